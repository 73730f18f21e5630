"""`shardwright lint FILE...`: rules over existing DeepSpeed configurations, and over arguments of
Megatron-LM's pretrain_gpt.py, without torch or either engine."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.cli.command_options import gpu_from_catalogue, positive
from shardwright.cli.terminal import error, print_diagnostics
from shardwright.diagnostics import Diagnostic, Location, Refusal, Source
from shardwright.diagnostics.diagnostic_rendering import (
    diagnostic_to_json,
    escape_control_characters,
    location_of,
)
from shardwright.utils.json_values import strict_json

if TYPE_CHECKING:
    from shardwright.lint.ds_config_document import Document
    from shardwright.lint.lint_rule import LintFinding
    from shardwright.migrate.file_kinds import FileKind
    from shardwright.utils.json_values import JsonValue


@dataclass(frozen=True, slots=True, kw_only=True)
class LintResult:
    """Holds the findings in one file. fixable: for each diagnostic, whether --fix mends it.
    applied_fixes: what --fix has mended. named_files: ds_configs that the file names, to lint
    next."""

    name: str
    diagnostics: tuple[Diagnostic, ...]
    source: Source | None
    fixable: tuple[bool, ...] = ()
    applied_fixes: tuple[LintFinding, ...] = ()
    notes: tuple[str, ...] = ()
    named_files: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return all(diagnostic.severity != "error" for diagnostic in self.diagnostics)


def add_lint_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="a ds_config.json, or Megatron-LM's options; - is standard input",
    )
    parser.add_argument(
        "--world-size",
        type=positive,
        metavar="N",
        help="the number of ranks, to check the batch sizes against",
    )
    parser.add_argument(
        "--for",
        dest="audience",
        choices=("deepspeed", "trainer", "lightning", "megatron"),
        help="who reads the file: a script that calls DeepSpeed; the HF Trainer or Accelerate, "
        'which fill in "auto" '
        '(default: trainer if the file contains a Trainer "auto"); PyTorch Lightning, which fills '
        "in the batch; or the parser of Megatron-LM's pretrain_gpt.py, "
        "whose options stand in a shell script",
    )
    parser.add_argument("--fix", action="store_true", help="fix in place what needs no decision")
    parser.add_argument(
        "--format",
        choices=("text", "json", "github"),
        default="text",
        help="json: one object per file, one per line",
    )
    model = parser.add_argument_group("the model")
    model.add_argument(
        "--model",
        metavar="M",
        help=(
            "a hub id or model folder: also check that it fits in memory, and takes the expert "
            "and sequence ranks"
        ),
    )
    model.add_argument(
        "--gpu", metavar="NAME", help="a GPU from the catalogue, such as h100-sxm-80gb"
    )
    model.add_argument(
        "--sequence-length", type=positive, metavar="S", help="tokens per sample (default: 4096)"
    )


def run_lint(args: argparse.Namespace) -> int:
    """Exit 1 if any file has an error, after all of them."""
    if args.fix and "-" in args.files:
        error("--fix needs a file to write to, not standard input")
        return 1
    if args.model is None and (args.gpu or args.sequence_length):
        error("--gpu and --sequence-length are for --model M")
        return 1
    if args.audience == "megatron" and (args.fix or args.model):
        error("--fix and --model are for a ds_config.json, not for --for megatron")
        return 1
    args.gpu = args.gpu and gpu_from_catalogue(args.gpu)
    reports = {"text": _text, "json": _json, "github": _github}
    ok, printed = True, 0
    paths = list(args.files)
    while paths:
        result = _lint(paths.pop(0), args)
        paths[:0] = result.named_files
        reports[args.format](result, printed)
        ok &= result.ok
        printed += len(result.diagnostics)
    return 0 if ok else 1


def _lint(path: str, args: argparse.Namespace) -> LintResult:
    from shardwright.lint.ds_config_document import STDIN, parse_ds_config, read_ds_config_text
    from shardwright.lint.ds_config_linter import diagnostic, lint, linted_ds_config
    from shardwright.migrate.file_kinds import other_file

    name = STDIN if path == "-" else path
    applied_fixes: tuple[LintFinding, ...] = ()
    notes: tuple[str, ...] = ()
    try:
        if args.audience == "megatron":
            from shardwright.lint.megatron_lint import ask_the_installed_parser, lint_arguments
            from shardwright.lint.megatron_script import read_arguments

            arguments = read_arguments(name, read_ds_config_text(path), args.world_size)
            found = lint_arguments(arguments)
            if not any(diagnostic.severity == "error" for diagnostic in found):
                refused, notes = ask_the_installed_parser(arguments)
                found += refused
            return LintResult(
                name=name,
                diagnostics=found,
                source=arguments.source,
                fixable=(False,) * len(found),
                notes=notes,
            )
        text = read_ds_config_text(path)
        kind = other_file(name, text)
        if kind is not None:
            return _lint_other_file(name, text, kind, args)
        document = parse_ds_config(name, text)
        if args.fix:
            document, applied_fixes = _fix(document, args)
        ds_config = linted_ds_config(document, args.audience, args.world_size)
        findings = lint(document, ds_config)
        if args.model is not None:
            from shardwright.lint.ds_config_model_rules import lint_for_model, memory

            model_findings = lint_for_model(ds_config, args.model, args.sequence_length)
            memory_findings, notes = memory(ds_config, args.model, args.gpu, args.sequence_length)
            findings = (*findings, *model_findings, *memory_findings)
    except Refusal as refusal:
        return LintResult(
            name=name,
            diagnostics=refusal.diagnostics,
            source=refusal.source,
            fixable=(False,) * len(refusal.diagnostics),
        )
    return LintResult(
        name=name,
        diagnostics=tuple(diagnostic(document, found) for found in findings),
        source=document.source,
        fixable=tuple(bool(found.fix) for found in findings),
        applied_fixes=applied_fixes,
        notes=notes,
    )


def _lint_other_file(name: str, text: str, kind: FileKind, args: argparse.Namespace) -> LintResult:
    """Lint the DeepSpeed settings of another program's file. Raises Refusal with SW4011 for a
    file that has none."""
    from shardwright.lint.ds_config_linter import diagnostic, lint, linted_ds_config
    from shardwright.migrate.file_kinds import refused_file

    settings = kind.lint(name, text) if kind.lint is not None else None
    if settings is None:
        raise refused_file(name, text, kind)
    told, document = settings.diagnostics, settings.document
    if document is not None:
        ds_config = linted_ds_config(document, "trainer", args.world_size)
        told += tuple(diagnostic(document, finding) for finding in lint(document, ds_config))
    return LintResult(
        name=name,
        diagnostics=told,
        source=settings.source,
        fixable=(False,) * len(told),
        named_files=(settings.ds_config_path,) if settings.ds_config_path else (),
    )


def _fix(document: Document, args: argparse.Namespace) -> tuple[Document, tuple[LintFinding, ...]]:
    from shardwright.lint.ds_config_linter import fixed
    from shardwright.utils.file_io import write_atomically

    changed, applied_fixes = fixed(document, args.audience, args.world_size)
    if applied_fixes:
        try:
            write_atomically(Path(document.name), changed.text)
        except OSError as error:
            message = f"{document.name} cannot be written: {error.strerror or error}"
            place = Location(file=document.name, line=0, column=0)
            help = "Nothing was changed. Give the file and its folder write rights."
            raise Refusal(
                Diagnostic(code="SW4010", message=message, help=help, location=place)
            ) from None
    return changed, applied_fixes


def _text(result: LintResult, printed: int) -> None:
    from shardwright.lint.lint_rule import dotted

    for found in result.applied_fixes:
        print(
            escape_control_characters(f"fixed {found.code} {dotted(found.key)}: {found.help}"),
            flush=True,
        )
    if result.diagnostics and printed:
        sys.stderr.write("\n")
    print_diagnostics(result.diagnostics, result.source)
    fixable = sum(result.fixable)
    if fixable:
        print(f"{fixable} of these can be mended with --fix", file=sys.stderr)
    for note in result.notes:
        print(escape_control_characters(note))
    if result.ok:
        print(f"ok {escape_control_characters(result.name)}", flush=True)


def _json(result: LintResult, printed: int) -> None:
    from shardwright.lint.lint_rule import dotted

    rows: list[JsonValue] = []
    for found, fixable in zip(result.diagnostics, result.fixable, strict=True):
        row = diagnostic_to_json(found, result.source)
        del row["file"]
        rows.append(
            {**row, "key": None if found.key is None else dotted(found.key), "fix": fixable}
        )
    document: dict[str, JsonValue] = {"file": result.name, "ok": result.ok, "diagnostics": rows}
    if result.applied_fixes:
        document["fixed"] = [
            {"code": f.code, "key": dotted(f.key), "message": f.message}
            for f in result.applied_fixes
        ]
    if result.notes:
        document["notes"] = list(result.notes)
    print(strict_json(document), flush=True)


def _github(result: LintResult, printed: int) -> None:
    """Print GitHub's workflow commands
    (https://docs.github.com/actions/reference/workflow-commands-for-github-actions)."""
    for found in result.diagnostics:
        place = location_of(found, result.source)
        file = _escaped(result.name).replace(":", "%3A").replace(",", "%2C")
        where = f"file={file}"
        if place is not None and place.line:
            where += (
                f",line={place.line},col={place.column},endColumn={place.column + place.length}"
            )
        text = f"{found.message}. {found.help}" if found.help else found.message
        level = "notice" if found.severity == "note" else found.severity
        print(f"::{level} {where},title={found.code}::{_escaped(text)}", flush=True)


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")

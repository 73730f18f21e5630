"""`shardwright prepare DIR`: tokenize a compiled folder's data ahead of its run; no GPU, no process
group."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.cli.command_options import add_json, positive
from shardwright.cli.terminal import print_diagnostics, shell_quoted, table_lines, use_color
from shardwright.diagnostics.diagnostic_rendering import escape_control_characters
from shardwright.utils.json_values import strict_json

if TYPE_CHECKING:
    from shardwright.data.data_summary import ImageThroughput, SampleSpan, SourceSummary
    from shardwright.data.dataset import Dataset
    from shardwright.plan.plan import Plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", metavar="DIR", type=Path, help="a compiled folder; with --check also a recipe"
    )
    parser.add_argument(
        "--check",
        type=positive,
        metavar="N",
        help=(
            "read the first N records of each source, show what becomes of them, and write nothing"
        ),
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    if args.check is not None:
        return _run_check(args.folder, args.check, as_json=args.json)
    from shardwright.data.data_preparation import prepare
    from shardwright.data.data_summary import (
        image_throughput,
        samples,
        summarize,
        summarize_validation,
    )
    from shardwright.data.dataset import resolve
    from shardwright.plan.island_plans import island_folders
    from shardwright.plan.plan import load_plan

    folder = args.folder
    plan = load_plan(folder)
    for island in island_folders(plan, folder):  # each reads its own folder
        if island.is_dir():
            prepare(load_plan(island), island, limit_bytes=None)
    prepare(plan, folder, limit_bytes=None)
    plan, data = resolve(plan, folder, check_all_ids=True)
    report = DataReport(
        plan=plan,
        folder=folder,
        checked=None,
        data=data,
        parts=summarize(plan, folder),
        validation=summarize_validation(plan, folder),
        samples=samples(plan, folder, data),
        rate=image_throughput(plan, folder) if plan.model.task_traits.has_images else None,
    )
    print(report_json(report) if args.json else report_text(report))
    return 0


def _run_check(subject: Path, max_records: int, *, as_json: bool) -> int:
    """Reports on the first records of each source. Raises Refusal (SW6153): more of them are bad
    than the recipe lets go, once the report is printed."""
    from shardwright.data.data_preparation import prepared_sample
    from shardwright.data.data_summary import record_samples, summarize, summarize_validation
    from shardwright.plan.plan import load_plan

    with tempfile.TemporaryDirectory(prefix="shardwright-check-") as temporary:
        folder = Path(temporary) if subject.is_file() else subject
        if subject.is_file():
            _compile_into(folder, subject)
        plan = load_plan(folder)
        with prepared_sample(plan, folder, max_records) as (tolerant, copy):
            report = DataReport(
                plan=plan,
                folder=subject,
                checked=max_records,
                data=None,
                parts=summarize(tolerant, copy),
                validation=summarize_validation(tolerant, copy),
                samples=record_samples(tolerant, copy),
                rate=None,
            )
            print(report_json(report) if as_json else report_text(report), flush=True)
            _check_shares(plan, tolerant, copy)
    return 0


def _compile_into(folder: Path, recipe_file: Path) -> None:
    from shardwright.compile import compile_recipe
    from shardwright.compiled_folder import write_folder
    from shardwright.recipe.recipe_loader import load_recipe

    recipe = load_recipe(recipe_file)
    compiled = compile_recipe(recipe)
    print_diagnostics(compiled.warnings, recipe.source)
    write_folder(folder, compiled.files)


def _check_shares(plan: Plan, tolerant: Plan, copy: Path) -> None:
    """Raises Refusal (SW6153). plan: with the recipe's shares; tolerant, copy: as they were
    prepared."""
    from shardwright.data.data_preparation import prepared_folder
    from shardwright.data.data_sources import tokenized_sections
    from shardwright.data.image_files import read_image_counts
    from shardwright.data.source_files import read_record_counts

    for part, prepared in zip(tokenized_sections(plan), tokenized_sections(tolerant), strict=True):
        here = prepared_folder(prepared, copy)
        counts = read_image_counts(here)
        read_record_counts(here).check(part.skip_damaged, counts.damaged, counts.told)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataReport:
    """Holds what the run will read. checked: records of each source that were read, where not all
    are; then data is None, because they make no training. parts, validation: counts of each source;
    rate: of a vision-language model."""

    plan: Plan
    folder: Path
    checked: int | None
    data: Dataset | None
    parts: tuple[SourceSummary, ...]
    validation: tuple[SourceSummary, ...]
    samples: list[list[SampleSpan]]
    rate: ImageThroughput | None


def report_json(report: DataReport) -> str:
    t, data, parts = report.plan.training, report.data, report.parts
    counts: dict[str, Any] = {"checked": report.checked}
    if data is not None:
        counts |= {
            "steps": t.steps,
            "epochs": t.epochs,
            "steps_per_epoch": data.order.steps_per_epoch,
            "rows": len(data.train),
            "validation_rows": 0 if data.validation is None else len(data.validation),
        }
    return strict_json(
        {
            "directory": str(report.folder),
            **counts,
            "documents": sum(p.documents for p in parts),
            "tokens": sum(p.tokens for p in parts),
            "trained_tokens": sum(p.trained_tokens for p in parts),
            "parts": [asdict(p) for p in parts],
            "validation_parts": [asdict(p) for p in report.validation],
            "pictures": None if report.rate is None else asdict(report.rate),
            "samples": [[asdict(piece) for piece in pieces] for pieces in report.samples],
        }
    )


def report_text(report: DataReport) -> str:
    """Writes a table of the sources, what there is to say of each, and the samples."""
    named = [(_name(p), p) for p in report.parts] + [
        (f"validation: {_name(p)}", p) for p in report.validation
    ]
    lines = [f"the first {report.checked:,} records of each source", ""] if report.checked else []
    lines += _table(named)
    for name, part in named:
        if notes := list(_notes(part, report.plan.training.sequence_length)):
            lines += ["", name, *(line for note in notes for line in _wrapped(note, "  "))]
    if report.data is not None:
        lines += [
            "",
            *(
                line
                for name, text in _training(report)
                for line in _wrapped(f"{name:<11}{text}", "", 11)
            ),
        ]
    for number, pieces in enumerate(report.samples, 1):
        shown = "in green" if use_color(sys.stdout) else "in [[ ]]"
        lines += ["", f"sample {number} of {len(report.samples)}, labels {shown}:", _marked(pieces)]
    if report.data is not None:
        lines += ["", f"next: shardwright run {shell_quoted(str(report.folder))}"]
    return "\n".join(lines)


def _name(part: SourceSummary) -> str:
    return escape_control_characters(part.kind if part.path is None else f"{part.kind} {part.path}")


def _table(named: Sequence[tuple[str, SourceSummary]]) -> list[str]:
    header = ("source", "sequences", "tokens", "trained on", "no end", "left out")
    rows = [
        (
            name,
            f"{p.sequences:,}",
            f"{p.tokens:,}",
            "-"
            if p.pictures and p.kind != "chat"
            else f"{p.trained_tokens / max(1, p.tokens):.1%}",
            f"{p.unclosed_conversations:,}" if p.kind == "chat" else "-",
            f"{sum(count for count, _, _ in _left_out(p)):,}" if p.records else "-",
        )
        for name, p in named
    ]
    legend = "trained on: share of the tokens that are labels; left out: records"
    if any(p.kind == "chat" for _, p in named):
        legend += "; no end: conversations whose last turn the chat template does not close"
    return [*table_lines(header, rows, text=(0,)), *_wrapped(legend)]


def _left_out(p: SourceSummary) -> Iterator[tuple[int, str, Sequence[str]]]:
    """Yields (records, why they are left out, messages of the first ones)."""
    from shardwright.diagnostics.code_registry import CODES

    for code, count in sorted(p.unusable.items()):
        yield count, f"{CODES[code]} ({code})", p.examples.get(code, ())
    for count, why, code in (
        (p.damaged, "a damaged image (SW6134)", "SW6134"),
        (p.too_many_images, "more images than data.images.per_row", ""),
        (p.too_long, "longer than training.sequence_length, which would cut an image", ""),
        (p.left_out, "no label within training.sequence_length", ""),
        (p.empty, "empty", ""),
    ):
        if count:
            yield count, why, p.examples.get(code, ())


def _notes(p: SourceSummary, length: int) -> Iterator[str]:
    """Yields what there is to say of a source beside its row of the table, a sentence each."""
    if p.kind in ("tokens", "megatron"):
        yield "holds token ids, all of which are read"
    if not p.documents:
        return
    what = "conversations" if p.kind == "chat" else "captions" if p.pictures else "documents"
    text = f"{p.documents:,} {what}"
    if p.pictures:
        text += f" with {p.pictures:,} images"
    alone = (
        "" if what == "captions" else f", {p.unpacked_padding:.1%} with one of them per sequence"
    )
    yield f"{text}; {p.padding:.1%} padding{alone}"
    if p.begin is not None:
        begin = escape_control_characters(p.begin) or "no token of its own (data.add_bos_token)"
        yield f"each document begins with {begin}"
    for count, why in (
        (p.cut, f"are cut at {length:,} tokens"),
        (p.reasoning_not_rendered, "have reasoning that the chat template does not write"),
        (p.replaced, "had half of a surrogate pair, which is U+FFFD now"),
    ):
        if count:
            yield f"{count:,} {why}"
    if reasons := list(_left_out(p)):
        yield f"left out, of {p.records:,} records:"
        for count, why, first in reasons:
            yield f"  {count:,}: {why}"
            yield from (f"     {escape_control_characters(message)}" for message in first)


def _training(report: DataReport) -> Iterator[tuple[str, str]]:
    t, data = report.plan.training, report.data
    assert data is not None
    epochs = t.steps / data.order.steps_per_epoch
    yield "training", f"{t.steps:,} steps of {t.global_batch_size:,} sequences, {epochs:.3g} epochs"
    yield "sequences", f"{len(data.train):,} of {t.sequence_length:,} tokens to train on"
    if data.validation is not None:
        yield "held out", f"{len(data.validation):,} for validation"
    if (r := report.rate) is not None:
        images_per_core_second, wanted = (
            f"{x:,.0f}" if x >= 10 else f"{x:.2g}" for x in (r.images_per_core_second, r.wanted)
        )
        cores = f"{r.cores:,} {'core' if r.cores == 1 else 'cores'} in all"
        yield (
            "images",
            f"a core of this machine decodes and prepares {images_per_core_second} a second, the "
            "planned steps "
            f"take {wanted}: {cores}, for {r.ranks:,} ranks of the first pipeline stage",
        )


def _wrapped(text: str, indent: str = "", hanging: int = 2) -> list[str]:
    """Breaks a line at the terminal's width; a pipe gets it whole. hanging: columns that further
    lines are moved by."""
    if not sys.stdout.isatty():
        return [indent + text]
    own = indent + " " * (len(text) - len(text.lstrip()))
    width = max(40, shutil.get_terminal_size().columns)
    return textwrap.wrap(
        text.lstrip(),
        width,
        initial_indent=own,
        subsequent_indent=own + " " * hanging,
        break_on_hyphens=False,
        break_long_words=False,
    )


def _marked(pieces: Sequence[SampleSpan]) -> str:
    """Joins a sample, with its labels marked. Line ends stay; what would move the cursor or change
    colours does not."""
    from shardwright.data.data_summary import SampleSpan, marked

    clean = [
        SampleSpan(text="".join(map(_printable, piece.text)), trained=piece.trained)
        for piece in pieces
    ]
    if not use_color(sys.stdout):
        return marked(clean, "[[", "]]")
    from rich.console import Console
    from rich.text import Text

    console = Console(soft_wrap=True, highlight=False)
    with console.capture() as captured:  # underlined, for white space is a label, too
        console.print(
            Text.assemble(*((piece.text, "underline green" * piece.trained) for piece in clean)),
            end="",
        )
    return captured.get()


def _printable(character: str) -> str:
    return character if character in "\n\t" or character.isprintable() else "\ufffd"

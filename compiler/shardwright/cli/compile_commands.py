"""`shardwright compile`, `prepare` and `verify`: make a folder that trains, read its data, and test
its layout on a tiny copy of the model."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.cli.command_options import add_folder, add_json, add_overrides, positive
from shardwright.cli.terminal import (
    labelled_lines,
    print_diagnostics,
    shell_quoted,
    table_lines,
    use_color,
)
from shardwright.diagnostics import Refusal, found
from shardwright.diagnostics.diagnostic_rendering import escape_control_characters
from shardwright.recipe.recipe_types import weights_summary
from shardwright.utils.json_values import strict_json
from shardwright.utils.number_format import GIB, SECONDS_PER_DAY, format_days, format_number

if TYPE_CHECKING:
    from shardwright.compile.recipe_compiler import CompileResult
    from shardwright.data.data_summary import ImageThroughput, SampleSpan, SourceSummary
    from shardwright.data.dataset import Dataset
    from shardwright.plan.plan import Plan, PlanStage
    from shardwright.verify.layout_verification import VerificationResult


def add_compile_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", type=Path, help="the recipe file")
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="DIR", help="the folder to write"
    )
    add_overrides(parser)
    add_json(parser)


def run_compile(args: argparse.Namespace) -> int:
    from shardwright.compile.compiled_folder import (
        check_output_folder,
        remove_surplus_island_plans,
        write_folder,
    )
    from shardwright.monitor.run_files import read_save_statistics
    from shardwright.plan.island_plans import island_name
    from shardwright.recipe.recipe_loader import load_recipe, with_measured_checkpoint_rate

    recipe = load_recipe(args.recipe, args.overrides)
    # Before the seconds that torch needs.
    islands = range(recipe.cluster.islands if recipe.training.outer else 0)
    for folder in (args.output, *(args.output / island_name(k) for k in islands)):
        check_output_folder(folder)
    saves = None
    is_auto = recipe.checkpoint.every_steps == "auto"
    if is_auto and recipe.cluster.checkpoint_gbytes_per_second is None:  # decision 025
        saves = read_save_statistics(args.output)
    if saves is not None:
        recipe = with_measured_checkpoint_rate(recipe, saves.gbytes_per_second)

    from shardwright.compile.recipe_compiler import compile_recipe

    compiled = compile_recipe(recipe)
    write_folder(args.output, compiled.files)
    for island, files in enumerate(compiled.islands):
        write_folder(args.output / island_name(island), files)
    remove_surplus_island_plans(args.output, len(compiled.islands))
    print_diagnostics(compiled.warnings, recipe.source)
    if args.json:
        print(compiled_json(compiled, args.output))
        return 0
    interval = ""
    if is_auto:
        every = compiled.plan.checkpoint.every_steps
        assert every is not None, "auto is always some steps"
        seconds = every * compiled.plan.predicted.time.step_seconds
        interval = f"every {every:,} steps, {format_days(seconds / SECONDS_PER_DAY)} apart"
        if saves is not None:
            interval += (
                f"; the run there wrote {format_number(saves.gbytes_per_second)} GB/s a node in "
                f"{saves.count} saves"
            )
    print(compiled_text(compiled, args.output, interval))
    return 0


def compiled_json(compiled: CompileResult, directory: Path) -> str:
    plan = compiled.plan
    return strict_json(
        {
            "directory": str(directory),
            "name": plan.name,
            "strategy": plan.strategy,
            "stages": plan.stages,
            "predicted": plan.predicted,
            "files": [*sorted(compiled.files), *_island_files(compiled)],
            "warnings": [
                {"code": d.code, "severity": d.severity, "message": d.message}
                for d in compiled.warnings
            ],
        }
    )


def _island_files(compiled: CompileResult) -> list[str]:
    from shardwright.plan.island_plans import island_name

    return [
        f"{island_name(k)}/{name}"
        for k, files in enumerate(compiled.islands)
        for name in sorted(files)
    ]


def compiled_text(compiled: CompileResult, directory: Path, interval: str = "") -> str:
    """Return what was decided, in the recipe's own words, and the next command. interval: of
    `every_steps: auto`."""
    from shardwright.report.plan_sentences import error_bar_text, hpz_text

    plan, model, files = compiled.plan, compiled.plan.model, compiled.files
    s, t, memory, time = plan.strategy, plan.training, plan.predicted.memory, plan.predicted.time
    peak, capacity = memory.peak_bytes / GIB, memory.capacity_bytes / GIB
    islands, of_each = (
        ("", "") if plan.islands == 1 else (f"{plan.islands} islands of ", ", of each island")
    )
    length = f"{t.steps} steps" if t.epochs is None else f"{t.epochs:g} epochs, in steps"
    each = t.sequences_of(1)
    batch = str(t.global_batch_size) + ("" if each == 1 else f" pairs x {each}")
    layout, _, settings = s.describe().partition(f" micro_batch_size={s.micro_batch_size} ")
    rows = [
        ("recipe", plan.name),
        (
            "model",
            (
                f"{model.architecture}, {model.total_parameters:,} parameters, "
                f"{weights_summary(model.weights)}"
            ),
        ),
        ("cluster", f"{islands}{plan.nodes} x {plan.gpus_per_node} {plan.gpu}"),
        ("layout", layout),
        ("", settings),
        *([("weights", hpz)] if (hpz := hpz_text(s)) else []),
        (
            "batch",
            (
                f"{t.global_batch_size} = {s.micro_batch_size} x {s.gradient_accumulation_steps} x "
                f"data {s.data}{of_each}"
            ),
        ),
        (
            "training",
            f"{length} of {batch} x {t.sequence_length} tokens, {t.precision}",
        ),
        *((f"stage {stage.stage}", _stage_text(stage)) for stage in plan.stages),
        ("memory", f"{peak:.1f} of {capacity:.1f} GiB on the peak-memory rank, predicted"),
        ("step", f"{time.step_seconds:.3g} s, {time.bubble_fraction:.0%} of it idle, predicted"),
        ("error", error_bar_text(compiled.error)),
        *([("saves", interval)] if interval else []),
        (
            "written",
            (
                f"{len(files) + len(_island_files(compiled))} files in "
                f"{escape_control_characters(str(directory))}"
            ),
        ),
    ]
    place = shell_quoted(str(directory))
    if plan.islands == 1:
        rows.append(("next", f"shardwright run {place}"))
    else:
        store = f"shardwright outer-store {place}    (at {plan.launch.outer_store})"
        rows.append(("next", store))
        rows += [("", f"shardwright run {place} --island {k}") for k in range(plan.islands)]
    return "\n".join(labelled_lines(rows))


def _stage_text(stage: PlanStage) -> str:
    first, last, rank = stage.layers[0], stage.layers[-1], stage.pipeline_rank
    if len(stage.layers) == 1:
        return f"1 layer on pipeline rank {rank}: {first}"
    return f"{len(stage.layers)} layers on pipeline rank {rank}: {first} ... {last}"


# `shardwright prepare DIR`: tokenize a compiled folder's data ahead of its run; no GPU, no process
# group.


def add_prepare_arguments(parser: argparse.ArgumentParser) -> None:
    add_folder(parser, "a compiled folder; with --check also a recipe")
    parser.add_argument(
        "--check",
        type=positive,
        metavar="N",
        help=(
            "read the first N records of each source, show what becomes of them, and write nothing"
        ),
    )
    add_json(parser)


def run_prepare(args: argparse.Namespace) -> int:
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
    from shardwright.data.data_preparation import prepared_folder, prepared_sample
    from shardwright.data.data_sources import tokenized_sections
    from shardwright.data.data_summary import record_samples, summarize, summarize_validation
    from shardwright.data.image_files import ImageCounts, read_image_counts
    from shardwright.data.source_files import read_record_counts
    from shardwright.plan.plan import load_plan
    from shardwright.recipe.recipe_loader import load_recipe

    with tempfile.TemporaryDirectory(prefix="shardwright-check-") as temporary:
        folder = Path(temporary) if subject.is_file() else subject
        if subject.is_file():
            from shardwright.compile.compiled_folder import write_folder
            from shardwright.compile.recipe_compiler import compile_recipe

            recipe = load_recipe(subject)
            compiled = compile_recipe(recipe)
            print_diagnostics(compiled.warnings, recipe.source)
            write_folder(folder, compiled.files)
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
            for part, prepared in zip(
                tokenized_sections(plan), tokenized_sections(tolerant), strict=True
            ):
                here = prepared_folder(prepared, copy)
                counts = ImageCounts(told=[]) if part.images is None else read_image_counts(here)
                read_record_counts(here).check(part.skip_damaged, counts.damaged, counts.told)
    return 0


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
            "parts": parts,
            "validation_parts": report.validation,
            "images": report.rate,
            "samples": report.samples,
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
    named = {"chat": "conversations", "preference": "completions"}
    what = named.get(p.kind, "captions" if p.pictures else "documents")
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
        (p.cut, f"are cut to fit into a sequence of {length:,} tokens"),
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
    each = t.sequences_of(1)
    what, size = ("sequences", "") if each == 1 else ("pairs", f"{each} x ")
    yield "training", f"{t.steps:,} steps of {t.global_batch_size:,} {what}, {epochs:.3g} epochs"
    yield what, f"{len(data.train):,} of {size}{t.sequence_length:,} tokens to train on"
    if t.objective.packed:
        used = sum((p.documents - p.left_out) // 2 for p in report.parts)
        mean = used / sum(p.sequences for p in report.parts)
        step = mean * t.global_batch_size
        yield "pairs", f"{mean:.3g} a sequence, {step:,.0f} a step, on average"
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
        SampleSpan(
            text="".join(c if c in "\n\t" or c.isprintable() else "\ufffd" for c in piece.text),
            trained=piece.trained,
        )
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


# `shardwright verify R`: does this recipe's layout compute what one process computes? A tiny copy,
# on this machine.


def add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recipe", metavar="RECIPE|DIR", type=Path, help="a recipe, or a compiled folder"
    )
    add_overrides(parser)
    add_json(parser)


def run_verify(args: argparse.Namespace) -> int:
    """Exit 1 where the tiny copy computes something else."""
    from shardwright.compile.forward_only_recipe import with_files_of_folder
    from shardwright.plan.plan import load_plan
    from shardwright.recipe.recipe_loader import load_recipe
    from shardwright.verify.layout_verification import verify_recipe

    layout = None
    if args.recipe.is_dir():
        recipe = load_recipe(args.recipe / "recipe.resolved.json", args.overrides)
        plan = load_plan(args.recipe)
        recipe = with_files_of_folder(recipe, plan, args.recipe)
        layout = None if args.overrides else plan.strategy
    else:
        recipe = load_recipe(args.recipe, args.overrides)

    def say(stage: str) -> None:
        if not args.json:
            print(f"... {stage}", file=sys.stderr, flush=True)

    try:
        verdict = verify_recipe(recipe, say, layout)
    except Refusal as refusal:
        raise Refusal(*refusal.diagnostics, source=refusal.source or recipe.source) from None
    path = str(args.recipe)
    print(
        verification_json(path, verdict) if args.json else verification_text(recipe.name, verdict)
    )
    if verdict.matches:
        return 0
    wrong = [check for check in verdict.checks if not check.passed]
    off = ", ".join(
        f"{check.name} off by {check.worst:.2g} (limit {check.limit:g})" for check in wrong
    )
    help = (
        "Do not pay for this run. Please report it with the recipe; another layout of `plan` "
        "may be right."
    )
    message = f"{verdict.verified} does not train as one process does: {off}"
    print_diagnostics((found("SW5401", None, message, help),), None)
    return 1


def verification_json(path: str, verdict: VerificationResult) -> str:
    checks = [
        {
            **dataclasses.asdict(check),
            "worst": check.worst if math.isfinite(check.worst) else None,
            "passed": check.passed,
        }
        for check in verdict.checks
    ]
    document = {"recipe": path, "same": verdict.matches, **dataclasses.asdict(verdict)}
    return json.dumps({**document, "checks": checks}, allow_nan=False)


def verification_text(name: str, verdict: VerificationResult) -> str:
    rows = [
        ("recipe", name),
        ("layout", verdict.layout),
        ("tried as", verdict.verified),
        ("on", f"{verdict.architecture}, {verdict.parameters:,} parameters, fp32, CPU"),
        *(
            (
                check.name,
                f"{'ok ' if check.passed else 'BAD'}  off by {check.worst:<8.2g} "
                f"limit {check.limit:<6.1g} {check.what}".rstrip(),
            )
            for check in verdict.checks
        ),
        (
            "verdict",
            (
                f"{'the same as one process' if verdict.matches else 'NOT the same'}, in "
                f"{verdict.seconds:.0f} s"
            ),
        ),
    ]
    return "\n".join(labelled_lines(rows))

"""Write what `shardwright plan` prints at the terminal's width: a line for each layout, and three
lines under them. `--wide` has the rest."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardwright.cli.terminal import labelled_lines, table_lines, table_width, terminal_width
from shardwright.cost.calibrated_costs import measured_run_of
from shardwright.cost.cost_constants import default_constants
from shardwright.engines.engine_table import AUTO_TARGET, ENGINES
from shardwright.layout.layout_estimate import Estimate
from shardwright.layout.planning_problem import Problem
from shardwright.search.engine_choice import OtherEngine, uncompared_engines_reason
from shardwright.search.layout_comparison import largest_loss
from shardwright.search.ranking_penalties import complexity_features, risk_adjusted_seconds
from shardwright.utils.number_format import GIB, format_number, rank_or_gpu

if TYPE_CHECKING:
    from shardwright.recipe.recipe_types import Recipe
    from shardwright.search.layout_search import SearchResult
    from shardwright.search.rejected_faster_layouts import RejectedFasterLayout

LABEL_WIDTH = 11
MIN_DIFFERENCE = 5e-4
"""A share of a step below which two steps are as long."""
MILLION = 1e6
LAYOUT = 1
NARROWEST_LAYOUT = 12

Variants = Sequence[str]
"""The same statement, from the longest words to the shortest."""


def summary_lines(
    problem: Problem,
    rows: Sequence[Estimate],
    result: SearchResult,
    other: OtherEngine | None,
    rejected: Sequence[RejectedFasterLayout],
) -> list[str]:
    """Return the table and the three lines under it. rows: layouts that run, best first; other:
    of `other_engine`; rejected: of `rejected_faster_layouts`."""
    width = terminal_width()
    lines = (
        ("why first", _why_first(problem, rows, result, rejected)),
        ("how sure", _how_sure(problem, rows[0])),
        ("engine", _engine(problem, rows[0], other)),
    )
    texts = [(name, _fitting(texts, width - LABEL_WIDTH)) for name, texts in lines]
    is_cpu = problem.cluster.gpu.is_cpu
    return [*_table(rows, width, is_cpu=is_cpu), "", *labelled_lines(texts, LABEL_WIDTH)]


def wrapped_lines(lines: Sequence[str]) -> list[str]:
    """Break lines between words at the terminal's width."""
    return [
        part
        for line in lines
        for part in textwrap.wrap(
            line,
            terminal_width(),
            subsequent_indent=" " * (len(line) - len(line.lstrip()) + 2),
            break_long_words=False,
            break_on_hyphens=False,
        )
        or [""]
    ]


def wrapped_rows(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Return labelled texts, broken between words at the terminal's width."""
    width = terminal_width() - LABEL_WIDTH
    parts = [
        ("" if place else name, line)
        for name, text in rows
        for place, line in enumerate(textwrap.wrap(text, width, break_on_hyphens=False))
    ]
    return labelled_lines(parts, LABEL_WIDTH)


def _fitting(variants: Variants, width: int) -> str:
    """Return the first variant that fits; the last one, shortened, where none does."""
    last = textwrap.shorten(variants[-1], max(width, 1), placeholder=" ...")
    return next((text for text in variants if len(text) <= width), last)


def _table(rows: Sequence[Estimate], width: int, *, is_cpu: bool) -> list[str]:
    """Lay the layouts out; "TP2 PP4" instead of "TP 2, PP 4" where the terminal is narrow."""
    unit = rank_or_gpu(is_cpu=is_cpu)
    for separator, space, has_unit in ((", ", " ", True), (" ", "", True), (" ", "", False)):
        header, *cells = _rows(rows, separator, space, unit, has_unit=has_unit)
        excess = table_width(header, cells) - width
        if excess <= 0:
            break
    else:
        widest = max(len(row[LAYOUT]) for row in cells)
        cells = _folded(cells, max(widest - excess, NARROWEST_LAYOUT))
    return table_lines(header, cells, text=(LAYOUT,), bold=(0,))


def _folded(cells: list[tuple[str, ...]], width: int) -> list[tuple[str, ...]]:
    """Continue layouts that are wider than that in rows of their own."""
    rows = []
    for row in cells:
        first, *rest = textwrap.wrap(row[LAYOUT], width, break_on_hyphens=False)
        rows.append((*row[:LAYOUT], first, *row[LAYOUT + 1 :]))
        rows += [tuple(part if i == LAYOUT else "" for i in range(len(row))) for part in rest]
    return rows


def _rows(
    rows: Sequence[Estimate], separator: str, space: str, unit: str, *, has_unit: bool
) -> list[tuple[str, ...]]:
    """Return the header and the cells. has_unit: cells of device hours, not their header."""
    is_priced = rows[0].training.cost is not None
    found: list[tuple[str, ...]] = [
        (
            *("#", "layout", "memory", "step", f"tokens/s/{unit}"),
            "cost" if has_unit or is_priced else f"{unit}-h",
        )
    ]
    for place, e in enumerate(rows, start=1):
        training, time = e.training, e.time
        hours = _amount(training.gpu_hours) + (f" {unit}-h" if has_unit else "")
        cost = hours if training.cost is None else _amount(training.cost)
        found.append(
            (
                str(place),
                separator.join(part.replace(" ", space) for part in e.strategy.letters()),
                f"{format_number(e.memory.peak_bytes / GIB, 2)} GiB",
                f"{format_number(time.step_seconds)} s",
                format_number(time.tokens_per_second_per_gpu),
                cost if training.steps else "-",
            )
        )
    return found


def _amount(value: float) -> str:
    """Format with three digits from a million on: 743, 17,895 and 1.82 M."""
    return format_number(value) if value < MILLION else f"{value / MILLION:,.3g} M"


def _why_first(
    problem: Problem,
    rows: Sequence[Estimate],
    result: SearchResult,
    rejected: Sequence[RejectedFasterLayout],
) -> Variants:
    """Compare row 1 with the next best, and with a row that is faster still."""
    recipe, (best, *others) = problem.recipe, result.ranked
    if not others:
        if not result.skipped:
            return (
                "no other layout that runs is within the recipe's pins",
                "no other layout runs",
            )
        least = result.skipped[0][0] / best.time.step_seconds - 1
        return (f"each of {len(result.skipped)} other layouts takes {least:.1%} longer at least",)
    places = {e.strategy: place for place, e in enumerate(rows, start=1)}
    second = others[0]
    place = places.get(second.strategy)
    name = "the next best" if place is None else f"row {place}"
    variants = _loses(recipe, name, second, best)
    faster = [
        (places[each.strategy], each)
        for each in rejected
        if each.strategy in places and each.strategy != second.strategy
    ]
    if not faster:
        return variants
    at, row = faster[0]
    full = "; " + _rejected(f"row {at}", row.faster, row.needs, short=False)
    short = "; " + _rejected(f"row {at}", row.faster, row.needs, short=True)
    return (
        variants[0] + full,
        *(variant + end for end in (full, short) for variant in variants[1:]),
        *variants,
    )


def _rejected(name: str, faster: float, needs: Sequence[str], *, short: bool) -> str:
    """Say why a faster layout is not the first: it may not fit, or it needs more features."""
    if not needs:
        low = f": memory predictions are up to {_headroom():.0%} too low"
        return f"{name} is {faster:.1%} faster, but may not fit" + ("" if short else low)
    if short:
        return f"{name} is {faster:.1%} faster, but more complex"
    return f"{name} is {faster:.1%} faster, within the error, but needs {' and '.join(needs)}"


def _loses(recipe: Recipe, name: str, estimate: Estimate, best: Estimate) -> Variants:
    """Say why `estimate` ranks behind `best`, by the decisions of layout_comparison.because."""
    step, ours = estimate.time.step_seconds, best.time.step_seconds
    more_memory = estimate.memory.peak_bytes > best.memory.peak_bytes
    needed = (
        f"{estimate.memory.peak_bytes / GIB:.1f} GiB against {best.memory.peak_bytes / GIB:.1f}"
    )
    if recipe.objective == "memory" and more_memory:
        return (f"{name} needs more memory: {needed}",)
    if abs(step / ours - 1) < MIN_DIFFERENCE:
        equal = f"{name} takes as long"
        more = estimate.memory.peak_bytes / best.memory.peak_bytes - 1 >= MIN_DIFFERENCE
        end = f"more memory: {needed}" if more else "as much memory"
        return (f"{equal} and needs {end}", equal)
    if step < ours:
        may_not_fit = risk_adjusted_seconds(recipe, estimate) >= risk_adjusted_seconds(recipe, best)
        added = complexity_features(estimate.strategy) - complexity_features(best.strategy)
        needs = () if may_not_fit else sorted(added)
        return tuple(
            _rejected(name, 1 - step / ours, needs, short=short) for short in (False, True)
        )
    loss, theirs, mine = largest_loss(estimate, best)
    longer = f"{name} takes {step / ours - 1:.1%} longer"
    return (f"{longer} ({loss}: {theirs:.3g} s against {mine:.3g} s)", f"{longer} ({loss})", longer)


def _how_sure(problem: Problem, best: Estimate) -> Variants:
    """Say what published runs and measurements tell of the step and the memory, and what not."""
    share, reason = best.error.step_time, best.error.step_time_reason
    run = measured_run_of(problem.recipe, problem.graph, best.strategy)
    traced = best.flops_source == "traced"
    if run is not None:
        step = [f"row 1 was run here and took {format_number(run.step_seconds.value)} s a step"]
    elif problem.recipe.cluster.measured is not None:
        step = ["the step follows from measurements of this machine", "measured on this machine"]
    elif share is None:
        step = [
            f"no error bar: published runs of this kind are too few ({reason})",
            "no error bar: published runs of this kind are too few",
            "no error bar: too few published runs",
        ]
    else:
        step = [
            f"8 of 10 comparable published runs took within {share:.0%} of their prediction",
            f"step within {share:.0%} for 8 of 10 published runs",
            f"step ± {share:.0%} (8 of 10 published runs)",
        ]
    if not traced and run is None:
        step = [f"{step[0]}; the model's FLOPs are counted, not traced", f"{step[-1]}, FLOPs rough"]
    memory = _memory_variants(problem.recipe, best)
    pairs = ((s, m) for s in step for m in memory)
    return (*sorted((f"{s}; {m}" for s, m in pairs), key=len, reverse=True), step[-1])


def _memory_variants(recipe: Recipe, best: Estimate) -> Variants:
    free = 1 - best.memory.peak_bytes / best.memory.capacity_bytes
    capacity = best.memory.capacity_bytes / GIB
    if free < 0:
        return (f"{-free:.0%} more than the {capacity:.0f} GiB of memory", "memory does not fit")
    low = f"predictions are up to {_headroom():.0%} too low"
    if free < _headroom() and recipe.parallelism.memory_headroom is None:
        return (f"{free:.0%} of memory is free, and {low}: it may run out", "memory may run out")
    room = f"{free:.0%} of {capacity:.0f} GiB is free"
    return (f"{room}; memory {low}", room)


def _headroom() -> float:
    return default_constants().memory_headroom


def _engine(problem: Problem, best: Estimate, other: OtherEngine | None) -> Variants:
    """Say what the best layout under the other engine takes, or why that is not known."""
    recipe = problem.recipe
    is_automatic = recipe.document.get("target") == AUTO_TARGET
    taken = f"target: auto takes {recipe.target}; " if is_automatic else ""
    variants = (
        (f"no other: {uncompared_engines_reason(problem)}", "no other runs this recipe")
        if other is None
        else _other_engine(best, other)
    )
    return tuple(taken + text for text in variants)


def _other_engine(best: Estimate, other: OtherEngine) -> Variants:
    name, letters = other.target, ", ".join(other.strategy.letters())
    step = f"{format_number(other.step_seconds)} s"
    if abs(other.slower) < MIN_DIFFERENCE:
        head = f"{name} would take as long"
        return (f"{head} ({letters})", head)
    if other.slower > 0:
        head = f"{name} would take {step} ({other.slower:+.1%})"
        return (f"{head} with {letters}: {other.because}", f"{head} with {letters}", head)
    faster = f"{-other.slower:.1%} faster"
    engine = name if ENGINES[name].tested_on_gpus else f"{name} (untested on GPUs)"
    short, head = f"{engine} is {faster}", f"{engine} would be {faster} ({step})"
    if other.wins:
        advice = f"write target: {name}"
        return (
            f"{head} with {letters}: {advice}",
            f"{head}: {advice}",
            f"{short}: {advice}",
            short,
        )
    if other.peak_bytes > best.memory.capacity_bytes * (1 - _headroom()):
        why = short_why = ", but may not fit"
    else:
        short_why = ", within the error"
        why = f"{short_why}, but more complex"
    return (
        f"{head} with {letters}, but {other.because}",
        f"{head}{why}",
        f"{short}{why}",
        f"{short}{short_why}",
        short,
    )

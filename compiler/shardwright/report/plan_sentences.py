"""Sentences about a plan, for the terminal and the report: how sure a prediction is, what islands
cost, what failures take, and why a layout lost."""

from __future__ import annotations

import math
from collections.abc import Iterable

from shardwright.cost.cost_constants import default_constants
from shardwright.cost.diloco_costs import ISLANDS, IslandsCost
from shardwright.cost.goodput import Goodput, MemoryCopyCost
from shardwright.cost.prediction_errors import LEAST_RUNS, LEAST_SOURCES, error_benchmark
from shardwright.cost.scoring_cost import ScoringCost
from shardwright.engines.engine_table import ENGINES
from shardwright.layout.layout import Layout
from shardwright.layout.layout_estimate import PredictionError
from shardwright.recipe.objectives import NEXT_TOKEN
from shardwright.recipe.recipe_types import TrainingFields
from shardwright.search.accumulation_dtype_choice import LowPrecisionAccumulation
from shardwright.search.cluster_sizing import (
    ClusterSizing,
    LargerBatch,
    SmallerClusterBatch,
    nodes_text,
)
from shardwright.search.engine_choice import OtherEngine
from shardwright.search.kernel_choice import ChosenKernels
from shardwright.search.layout_comparison import SlowerRegion
from shardwright.search.recovery_goodput import RecoveryGoodput
from shardwright.search.rejected_faster_layouts import RejectedFasterLayout
from shardwright.utils.number_format import (
    SECONDS_PER_DAY,
    format_bytes,
    format_days,
    format_number,
)

MIN_BATCH_GAIN = 0.005  # of the days; below it a larger batch gains nothing
MIN_GOODPUT, NEARLY_FULL_GOODPUT = 1e-3, 0.9995
"""Shares of the time that trains: below the first nobody waits for the end, above the second no
loss is worth a line."""


def error_bar_text(error: PredictionError) -> str:
    """Return the error bars of one layout's step and memory, or why it has none."""
    kept = (
        f"memory_headroom: auto keeps {default_constants().memory_headroom:.0%} free, by runs "
        "of other kinds"
    )
    if error.step_time is None and error.step_time_reason == error.memory_reason:
        return f"{not_calibrated_text(error.step_time_reason)}; {kept}"
    parts = [
        f"{words} ± {share:.1%} ({regime})"
        if share is not None
        else f"{words} {not_calibrated_text(reason)}"
        for words, share, reason, regime in (
            ("the step", error.step_time, error.step_time_reason, error.step_time_regime),
            ("the memory", error.memory, error.memory_reason, error.memory_regime),
        )
    ]
    if error.memory is None:
        parts.append(kept)
    return "; ".join(
        parts
        if error.step_time is None and error.memory is None
        else [*parts, f"±: {error_source_text()}"]
    )


def flops_source_text(source: str) -> str:
    """Return what makes a prediction without traced FLOPs less sure; "" where they were traced."""
    if source == "traced":
        return ""
    reason = source.removeprefix("counted: ")
    return (
        "counted from the parameters' shapes, so the step and the memory are less sure: the "
        f"model's own code could not be traced ({reason})"
    )


def not_calibrated_text(reason: str) -> str:
    """Return why a prediction has no error bar."""
    return (
        f"not calibrated ({reason}): fewer than {LEAST_RUNS} published runs of {LEAST_SOURCES} "
        "sources are of that kind"
    )


def error_source_text() -> str:
    """Return where the ± comes from."""
    return (
        f"holds 80 % of the regime's published runs, of {error_benchmark().time.runs} of "
        f"{error_benchmark().projects} projects, each predicted from the others (make bench-cost)"
    )


def objective_lines(training: TrainingFields, cost: ScoringCost | None) -> list[str]:
    """Return what a step's examples are, what is read of another model, and what that costs; empty
    for next tokens. cost: of `scoring_cost`."""
    objective, batch = training.objective, training.global_batch_size
    traits = objective.traits
    if objective.name == NEXT_TOKEN:
        return []
    lines = []
    if traits.reads_preferences:
        examples = (
            "sequences of whole pairs"
            if objective.packed
            else "pairs of two sequences"
            if traits.compares_pairs
            else "labelled completions"
        )
        lines = [f"{objective.name}: {batch:,} {examples} a step"]
    if traits.forward_only_passes:
        lines[0] += ", after a forward pass over as many of other prompts; the step counts both"
    return lines + scoring_lines(training, cost)


def scoring_lines(training: TrainingFields, cost: ScoringCost | None) -> list[str]:
    """Return what is scored before the first step, how long that takes and the bytes of its file.
    cost: of `scoring_cost`."""
    if cost is None:
        return []
    objective, traits = training.objective, training.objective.traits
    each = (
        "sequences"
        if objective.packed
        else "pairs"
        if traits.compares_pairs
        else "completions"
        if traits.reads_labels
        else "examples"
    )
    if traits.reads_teacher:
        text = (
            f"{objective.name}: the teacher's tokens are read from {cost.scored}, which "
            "`shardwright score` writes before; these figures do not count that"
        )
    elif cost.scored is not None:
        text = (
            f"the reference {cost.scored} has a layout of its own, which these figures do not count"
        )
    else:
        text = "the reference is scored over all the data before the first step, in the same layout"
        if cost.step_seconds is not None:
            text += f": about {_time(cost.step_seconds)} for as many {each} as a step takes"
        if cost.training_seconds is not None:
            text += f", {_time(cost.training_seconds)} for as many as {cost.steps:,} steps take"
        text += "; the time of the training does not count that"
    size = f"at most {format_bytes(cost.step_bytes)} for as many {each} as a step takes"
    if cost.training_bytes is not None:
        size += f", {format_bytes(cost.training_bytes)} for as many as {cost.steps:,} steps take"
    with_top = f" with --top {cost.top}" if cost.top else ""
    return [text, f"the score file{with_top} has {size}"]


def hpz_text(s: Layout) -> str:
    """Return what hpZ, which no key of a recipe asks for, does to the weights; "" without it."""
    ranks = s.hpz_partition_size
    return (
        "" if ranks == 1 else f"a second copy inside each node, shared out over {ranks} ranks (hpZ)"
    )


def slower_region_text(region: SlowerRegion) -> str:
    """Return the keys and values that the region's layouts share."""
    return " ".join(f"{key}={value}" for key, value in region.where)


def slowdown_text(region: SlowerRegion) -> str:
    """Return how much longer the region's best step takes, at least where one is not priced."""
    return f"{'' if region.at_least is None else '>='}{region.nearest:+.1%}"


def slowdown_reason(region: SlowerRegion) -> str:
    """Return why the region's best priced layout is slower; with its own step, where slowdown_text
    is of layouts that are not priced."""
    own = "" if region.at_least is None else f"best priced {region.slower:+.1%}, "
    return f"{own}{region.because}"


def rejected_faster_text(found: RejectedFasterLayout) -> str:
    """Return why a faster layout is not the chosen one: it may not fit, or needs more features."""
    what = found.strategy.describe()
    if not found.needs:
        return (
            f"{what} would be {found.faster:.1%} faster, but needs {found.peak_bytes / 2**30:.1f} "
            f"of {found.capacity_bytes / 2**30:.0f} GiB and may not fit: predictions of memory "
            f"are up to {default_constants().memory_headroom:.0%} too low"
        )
    lost = " and ".join(found.unavailable_features)
    return (
        f"{what} is {found.faster:.1%} faster, but needs {' and '.join(found.needs)}, within the "
        f"prediction's error, {error_benchmark().time.error:.1%} for each part"
        + (f"; it gives up {lost}" if lost else "")
    )


def low_precision_accumulation_text(found: LowPrecisionAccumulation) -> str:
    """Return why gradients are summed in bf16."""
    if found.seconds is None:
        return "gradients are summed in bf16: no layout fits with sums in fp32"
    more = (
        ""
        if found.weighed is None or found.weighed <= found.seconds
        else f", {found.weighed:.3g} s with its risk"
    )
    return (
        "gradients are summed in bf16: with sums in fp32 the best step would take "
        f"{found.seconds:.3g} s{more}"
    )


def chosen_kernels_text(chosen: ChosenKernels) -> str:
    """Return what `kernels: auto` took, and what the others would cost."""
    other = "hf" if chosen.kernels == "compile" else "compile"
    if chosen.other_seconds is None:
        return f"kernels: auto takes {chosen.kernels}: no layout runs with {other}"
    return (
        f"kernels: auto takes {chosen.kernels}: the best step would take "
        f"{chosen.other_seconds:.3g} s with {other}"
    )


def other_engine_text(other: OtherEngine) -> str:
    """Return what the best layout under another engine takes, and why one of the two loses."""
    is_tested = ENGINES[other.target].tested_on_gpus
    untested = "" if is_tested else f"; {other.target} is not tested on GPUs"
    taken = f"target: auto takes {other.chosen}; " if other.automatic else ""
    loser = other.chosen if other.wins else other.target
    return (
        f"{taken}the best step under target: {other.target} would take {other.step_seconds:.3g} "
        f"s ({other.slower:+.1%}), {other.strategy.describe()}; {loser} ranks lower: "
        f"{other.because}{untested}"
    )


def cluster_bound_text(sizing: ClusterSizing) -> str:
    """Return what keeps the cluster from being smaller."""
    if sizing.smaller_nodes is None:
        return "no smaller cluster divides the batch over its GPUs"
    if sizing.smaller_days is None:
        return f"memory bounds it: on {nodes_text(sizing.smaller_nodes)} no layout fits"
    return (
        f"time bounds it: on {nodes_text(sizing.smaller_nodes)} it would take "
        f"{sizing.smaller_days:.3g} days"
    )


def smaller_cluster_batch_text(smaller: SmallerClusterBatch, batch: int, nodes: int) -> str:
    """Return what a batch that a smaller cluster divides would take and cost. batch, nodes: the
    recipe's own batch, and the cluster that it needs."""
    price = (
        ""
        if smaller.cost is None
        else f" and cost {smaller.cost:,.0f} instead of {smaller.cost_now:,.0f}"
    )
    return (
        f"the batch of {batch} bounds it, which smaller clusters divide worse than "
        f"{nodes_text(nodes)}: with global_batch_size {smaller.global_batch_size}, "
        f"{nodes_text(smaller.nodes)} would take {smaller.days:.3g} days for the same "
        f"tokens{price}"
    )


def larger_batch_text(larger: LargerBatch) -> str:
    """Return how much sooner the same cluster trains the same tokens with a larger batch."""
    if larger.shorter < MIN_BATCH_GAIN:
        return f"a global_batch_size of {larger.global_batch_size} would gain nothing in time"
    return (
        f"with global_batch_size {larger.global_batch_size} the same tokens would take "
        f"{larger.days:.3g} days, {larger.shorter:.0%} less"
    )


def goodput_lines(g: Goodput) -> list[str]:
    """Return the expected time; where much of it is lost, also what takes it and what would be
    better."""
    each = f"a failure every {_time(g.cluster_mtbf_hours * 3600)}"
    every = (
        "after the last step only"
        if g.interval_steps is None
        else f"every {_steps(g.interval_steps)}"
    )
    trains = f"{g.fraction:.1%} of the time trains"
    save = f"{_time(g.save_seconds)} {every}"
    if g.expected_days is None or g.fraction < MIN_GOODPUT:
        ends = (
            f"less than {MIN_GOODPUT:.1%} of the time trains"
            if g.fraction < MIN_GOODPUT
            else trains
        )
        return [f"{ends}: {each}, a save of {save}", *_better(g)]
    expected = (
        f"{format_days(g.expected_days)} with saves, failures and restarts, {trains}; {each}, "
        f"{format_number(g.expected_failures or 0)} in all"
    )
    memory = [] if g.memory is None else [memory_copy_text(g.memory)]
    if g.fraction > NEARLY_FULL_GOODPUT:
        return [expected, *memory]
    return [
        expected,
        *memory,
        f"saves {_days(g.lost_to_saves_days)} ({save}), work done again "
        f"{_days(g.lost_to_failures_days)}, restarts {_days(g.lost_to_restarts_days)} "
        f"({_time(g.restart_seconds)} each)",
        *_better(g),
    ]


def memory_copy_text(m: MemoryCopyCost) -> str:
    """Return what copies in host memory cost."""
    return (
        f"copies in memory every {_steps(m.every_steps)}: {_time(m.copy_seconds)} each "
        f"({_time(m.seconds_per_step)} a step), {format_number(m.node_gbytes)} GB of a node to "
        f"itself and to its peer, {format_number(m.host_gbytes)} GB of its memory held"
    )


def recovery_lines(r: RecoveryGoodput) -> list[str]:
    """Return what `run --supervise` makes of the goodput, and for which numbers of nodes the run
    cannot be planned again; [] where the recipe has no launch.recovery."""
    if not r.is_configured:
        return []
    named = f"{r.spares} spare host{'' if r.spares == 1 else 's'}"
    if r.fewer_nodes:
        named += f", planned again for {_list(map(str, r.fewer_nodes))} nodes"
    days = "" if r.expected_days is None else f", {format_days(r.expected_days)}"
    lines = [
        f"{r.fraction:.1%} of the time trains with `run --supervise` ({named}){days}; "
        f"{r.fraction_by_hand:.1%} with restarts by hand",
        f"a restart takes {_time(r.restart_seconds)} on average, by hand "
        f"{_time(r.by_hand_seconds)}; {r.by_hand_share:.0%} of lost nodes wait for hands; with one "
        f"spare host more {r.fraction_with_a_spare:.1%} of the time trains",
    ]
    return lines + [f"no plan for {n} nodes: {why}" for n, why in r.unplannable.items()]


def _list(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def _better(g: Goodput) -> list[str]:
    parts = []
    if g.worth_of_half_the_save_days is not None:
        parts.append(f"half the save is worth {_days(g.worth_of_half_the_save_days)}")
    is_worth_it = (
        g.auto_expected_days is None
        or (g.expected_days or math.inf) * NEARLY_FULL_GOODPUT > g.auto_expected_days
    )
    if g.interval_steps != g.auto_interval_steps and is_worth_it:
        takes = "" if g.auto_expected_days is None else f", {format_days(g.auto_expected_days)}"
        parts.append(
            f"checkpoint.every_steps: auto is every {_steps(g.auto_interval_steps)}{takes}"
        )
    return ["; ".join(parts)] if parts else []


def _steps(count: int) -> str:
    return "step" if count == 1 else f"{count:,} steps"


def _days(days: float | None) -> str:
    return format_days(days or 0.0)


def _time(seconds: float) -> str:
    return format_days(seconds / SECONDS_PER_DAY)


_PENALTIES = {
    2: "+0.2 % at 1.3B parameters, -0.18 % at 4B, -0.19 % at 10B",
    4: "+0.5 % at 1.3B parameters, +0.18 % at 4B, +0.29 % at 10B",
    8: "+1.3 % at 1.3B parameters",
}
_THEIRS = "arXiv 2503.09799: theirs, tuned, an outer step every 30; not this run's"


def loss_penalty_line(islands: int) -> str:
    """Return what the papers say that islands cost in loss."""
    told = {islands: _PENALTIES[islands]} if islands in _PENALTIES else _PENALTIES
    said = "; ".join(f"{n} islands {figures}" for n, figures in told.items())
    return f"loss beside data parallelism: {said} ({_THEIRS})"


def islands_cost_lines(found: IslandsCost) -> list[str]:
    """Return what the outer steps cost, what data parallelism would cost, and which to take."""
    waits = (
        f"training waits {found.exposed_seconds:.3g} s of it, {found.exposed_share:.1%} of "
        "what the steps take"
    )
    return [
        f"{found.islands} over links of {found.link_gbits_per_second:g} Gbit/s: every "
        f"{found.every_steps} steps {format_bytes(round(found.sent_bytes))} each way, in "
        f"{found.outer_seconds:.3g} s; {waits}",
        f"as one world, plain data parallelism: {format_bytes(round(found.gradient_bytes))} each "
        f"way in every step, in {found.gradient_seconds:.3g} s",
        f"a step takes {found.step_seconds:.4g} s with islands; as one world "
        f"{found.data_parallel_step_seconds:.4g} s where the gradients hide behind it, "
        f"{found.data_parallel_longest_seconds:.4g} s where none do",
        _better_of_islands_and_data_parallel(found),
        loss_penalty_line(found.islands),
    ]


def _better_of_islands_and_data_parallel(found: IslandsCost) -> str:
    days = ""
    if found.days is not None and found.data_parallel_days is not None:
        other, this = format_days(found.data_parallel_days), format_days(found.days)
        days = (
            f": {this} against {other} at best"
            if found.take == ISLANDS
            else f": {other} against {this}"
        )
    if found.take == ISLANDS:
        return f"take islands{days}"
    return (
        f"take plain data parallelism{days}, if its gradients hide; it costs nothing in loss "
        "(cluster.islands: 1)"
    )

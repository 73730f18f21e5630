"""`shardwright explain DIR|R`: the chosen plan in words and numbers."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from shardwright.cli.estimate_command import (
    cluster_text,
    goodput_json,
    goodput_rows,
    islands_json,
    islands_rows,
    measurement_section_lines,
    measurements_json,
    training_length_text,
)
from shardwright.cli.plan_command import GIB
from shardwright.cli.terminal import table_lines, title
from shardwright.cost.goodput import Goodput, goodput
from shardwright.cost.layout_costs import RankBreakdown, StepTimeBreakdown
from shardwright.layout.layout import in_layer_axes, in_layer_collectives_text
from shardwright.layout.planning_problem import Problem
from shardwright.models.model_files import weights_summary
from shardwright.report.plan_sentences import (
    error_bar_text,
    hpz_text,
    other_engine_text,
    rejected_faster_text,
)
from shardwright.search.plan_explanation import (
    MORE_FACTOR,
    AlternativeLayout,
    HpzAlternative,
    KeyExplanation,
    PlanExplanation,
    Sensitivity,
    explain,
)
from shardwright.utils.json_records import copy_shared_fields
from shardwright.utils.number_format import format_bytes, format_token_rate

if TYPE_CHECKING:
    from shardwright.cli.command_options import PricedRecipe
    from shardwright.layout.layout_estimate import Estimate, Time
    from shardwright.recipe.recipe_types import Recipe, TrainingSection
    from shardwright.utils.json_values import JsonObject

# `StepTimeBreakdown`' fields in words; {} is in_layer_collectives_text() of the layout.
STEP_PART_LABELS = {
    "forward_seconds": "forward passes",
    "backward_seconds": "backward passes",
    "recompute_seconds": "recomputation (activation_checkpointing)",
    "accumulate_seconds": "adding up gradients",
    "host_seconds": "overhead of each micro-batch",
    "tensor_forward_seconds": "{} collectives, forward",
    "tensor_backward_seconds": "{} collectives, backward",
    "pipeline_comm_seconds": "sends between stages",
    "data_comm_seconds": "data-parallel collectives",
    "optimizer_seconds": "the optimizer",
    "idle_seconds": "idle: the pipeline fills and drains",
    "outer_comm_seconds": "the outer step between islands",
}
# `Traffic`'s fields in words.
TRAFFIC_LABELS = {
    "rows": "rows of tokens to their experts and back",
    "context_all_to_all": "tokens for heads around attention",
    "activations": "activations over tensor ranks, reduced",
    "tensor_all_gather": "activations over tensor ranks, gathered",
    "sent": "activations and gradients to other pipeline ranks",
    "tied": "the gradient of the tied weights",
    "reduced": "gradients over data ranks, reduced",
    "gathered": "parameters over data ranks, gathered",
}
# (words, the parts of `StepTimeBreakdown`) of the table by pipeline rank; {} is in_layer_axes() of
# the layout
RANK_TIME_COLUMNS = (
    ("forward", ("forward_seconds",)),
    ("backward", ("backward_seconds", "accumulate_seconds", "host_seconds")),
    ("recompute", ("recompute_seconds",)),
    ("{}", ("tensor_forward_seconds", "tensor_backward_seconds")),
    ("pipeline", ("pipeline_comm_seconds",)),
    ("data", ("data_comm_seconds",)),
    ("optimizer", ("optimizer_seconds",)),
    ("idle", ("idle_seconds",)),
)
RANK_MEMORY_COLUMNS = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "working",
    "framework",
    "allocator",
)
RESOURCE_LABELS = {
    "inter_node_bandwidth": "bandwidth between nodes",
    "intra_node_bandwidth": "bandwidth inside a node",
    "memory": "memory a GPU",
    "memory_bandwidth": "memory bandwidth",
    "peak_flops": "peak FLOP/s",
}
MOST_RANKS = 16
"""Pipeline ranks in a table; of more, the first, the last, and those that matter."""


def explain_priced_recipe(priced: PricedRecipe) -> PlanExplanation:
    return explain(copy_shared_fields(Problem, priced), priced.estimate)


def expected_goodput(priced: PricedRecipe) -> Goodput | None:
    """Of a compiled folder with what its run measured of its saves."""
    measured = None if priced.saves is None else priced.saves.gbytes_per_second
    return goodput(copy_shared_fields(Problem, priced), priced.estimate, measured=measured)


def page(priced: PricedRecipe, found: PlanExplanation) -> str:
    sections = [
        _head(priced, found),
        _memory(priced, found),
        *(part(found) for part in (_step, _moved, _reasons, _sensitivity, _next)),
        measurement_section_lines(priced.recipe, priced.cluster),
    ]
    return "\n\n".join("\n".join(section) for section in sections if section)


def _head(priced: PricedRecipe, found: PlanExplanation) -> list[str]:
    e, cluster, graph = found.chosen, priced.cluster, priced.graph
    memory, time = e.memory, e.time
    weights = weights_summary(priced.recipe.model.weights)
    rows = [
        ("recipe", priced.recipe.name),
        ("model", f"{graph.architecture}, {graph.total_parameters:,} parameters, {weights}"),
        ("cluster", cluster_text(priced.recipe, cluster)),
        ("layout", e.strategy.describe()),
        *(
            []
            if found.hpz_alternative is None
            else [("weights", _weights(found.hpz_alternative, e, priced.recipe))]
        ),
        ("place", _place(found)),
        (
            "memory",
            f"{memory.peak_bytes / GIB:.1f} of {memory.capacity_bytes / GIB:.1f} GiB on the "
            "fullest device" + ("" if memory.fits else ": it does not fit"),
        ),
        (
            "step",
            f"{time.step_seconds:.4g} s, "
            f"{format_token_rate(time.tokens_per_second_per_gpu, is_cpu=cluster.gpu.is_cpu)}, "
            f"MFU {time.mfu:.1%}",
        ),
        ("error", error_bar_text(e.error)),
        ("training", training_length_text(priced.recipe, e.training)),
        *goodput_rows(expected_goodput(priced)),
        *islands_rows(priced.recipe, graph, e),
    ]
    if last_learning_rate_is_zero(priced.recipe.training):
        rows.append(("", "the last step's learning rate is 0 (scheduler.min_lr)"))
    rows.append(("bound by", found.binding))
    rows += [("set aside", rejected_faster_text(each)) for each in found.rejected_faster_layouts]
    if found.other_engine is not None:
        rows.append(("engine", other_engine_text(found.other_engine)))
    if priced.plan is not None and priced.has_stale_prediction:
        then = priced.plan.predicted
        told = (
            f"{then.time.step_seconds:.4g} s and {then.memory.peak_bytes / GIB:.1f} GiB when it "
            "compiled this"
        )
        version = f"shardwright {priced.plan.versions['shardwright']}"
        rows.append(("note", f"{version} predicted {told}; all figures here are this version's"))
    return [f"{name:<9} {text}" for name, text in rows]


def last_learning_rate_is_zero(training: TrainingSection) -> bool:
    """Whether the last step trains nothing."""
    from shardwright.plan.plan import zero_learning_rate_updates

    return zero_learning_rate_updates(training) > 0


def _weights(copy: HpzAlternative, chosen: Estimate, recipe: Recipe) -> str:
    """Whether a second copy of the weights lies inside each node, and why."""
    change = copy.other_step_seconds / chosen.time.step_seconds - 1
    if copy.taken:
        more = (chosen.memory.peak_bytes - copy.other_peak_bytes) / GIB
        return (
            f"{hpz_text(chosen.strategy)}: without it {change:+.1%} of the step, {-more:+.1f} GiB"
        )
    none = "no second copy inside each node (hpZ): "
    if recipe.objective == "memory" and change < 0:
        return none + "objective: memory"
    if change >= 0:
        return f"{none}the step would take {change:.1%} longer"
    needs = f"{copy.other_peak_bytes / GIB:.1f} of {chosen.memory.capacity_bytes / GIB:.1f} GiB"
    return (
        f"{none}{change:+.1%} of the step, but {needs} leaves less than predictions fall short by"
    )


def _place(found: PlanExplanation) -> str:
    if found.place is None:
        return (
            "it does not run "
            f"({', '.join(d.code for d in found.chosen.diagnostics if d.severity == 'error')})"
        )
    pinned = [reason.key for reason in found.keys if reason.pinned]
    of = f"{found.place} of the {found.layouts} layouts that run"
    return f"{of}; pinned: {', '.join(pinned)}" if pinned else of


def _memory(priced: PricedRecipe, found: PlanExplanation) -> list[str]:
    """GiB, one row a pipeline rank."""
    header = ("pipeline rank", "layers", *RANK_MEMORY_COLUMNS, "total", "free")
    capacity = found.chosen.memory.capacity_bytes
    last = len(priced.graph.layers) - 1
    rows: list[tuple[str, ...]] = []
    bold: list[int] = []
    for rank in _shown(found):
        parts = [getattr(rank.memory, f"{column}_bytes") for column in RANK_MEMORY_COLUMNS]
        total = rank.memory.peak_bytes
        bold += [len(rows)] * (rank.pipeline_rank == found.breakdown.peak_memory_rank)
        cells = [f"{value / GIB:.2f}" for value in (*parts, total, capacity - total)]
        rows.append((str(rank.pipeline_rank), _layers(rank, last), *cells))
    return [
        title(f"Memory: GiB on the fullest device of each pipeline rank, of {capacity / GIB:.1f}"),
        *table_lines(header, rows, text=(1,), bold=bold, indent="  "),
        *_left_out(found),
        "  working: short-lived tensors of a backward pass or of the optimizer's step; framework: "
        "context and communicators;",
        "  allocator: freed blocks that it keeps",
    ]


def _layers(rank: RankBreakdown, last: int) -> str:
    """Decoder layers by their numbers: "embedding, 0-3 and 33-35, head". last: the head's place."""

    def span(start: int, stop: int) -> str:
        first, final = max(start, 1) - 1, min(stop, last) - 2
        decoders = [] if final < first else [str(first) if first == final else f"{first}-{final}"]
        return (
            ", ".join(
                ["embedding"] * (start == 0 < stop) + decoders + ["head"] * (start <= last < stop)
            )
            or "none"
        )

    return " and ".join(span(*bounds) for bounds in rank.layers)


def _shown(found: PlanExplanation) -> list[RankBreakdown]:
    ranks = found.breakdown.ranks
    if len(ranks) <= MOST_RANKS:
        return list(ranks)
    kept = {
        0,
        1,
        len(ranks) - 2,
        len(ranks) - 1,
        found.breakdown.peak_memory_rank,
        found.breakdown.slowest_rank,
    }
    return [rank for rank in ranks if rank.pipeline_rank in kept]


def _left_out(found: PlanExplanation) -> list[str]:
    left = len(found.breakdown.ranks) - len(_shown(found))
    return [f"  {left} more pipeline ranks are in --json"] if left else []


def _step(found: PlanExplanation) -> list[str]:
    step, total = found.breakdown.step, found.chosen.time.step_seconds
    s = found.chosen.strategy
    parts = [
        (words.format(in_layer_collectives_text(s)), getattr(step, name))
        for name, words in STEP_PART_LABELS.items()
    ]
    rows = [(words, _ms(seconds), f"{seconds / total:.1%}") for words, seconds in parts if seconds]
    rows.append(("the step", _ms(total), "100.0%"))
    several = len(found.breakdown.ranks) > 1
    slowest_rank = (
        f" of pipeline rank {found.breakdown.slowest_rank}, the slowest" if several else ""
    )
    lines = [
        title(f"Time: milliseconds of a step{slowest_rank}"),
        *table_lines(("part", "ms", "share"), rows, text=(0,), indent="  "),
    ]
    if several:
        header = (
            "pipeline rank",
            *(name.format("+".join(in_layer_axes(s))) for name, _ in RANK_TIME_COLUMNS),
        )
        ranks = _shown(found)
        each = [
            (str(r.pipeline_rank), *(_ms(_sum(r.time, fields)) for _, fields in RANK_TIME_COLUMNS))
            for r in ranks
        ]
        bold = [i for i, r in enumerate(ranks) if r.pipeline_rank == found.breakdown.slowest_rank]
        lines += ["", *table_lines(header, each, bold=bold, indent="  "), *_left_out(found)]
    return lines


def _moved(found: PlanExplanation) -> list[str]:
    traffic = found.breakdown.ranks[found.breakdown.slowest_rank].traffic
    rows = [(words, float(getattr(traffic, name))) for name, words in TRAFFIC_LABELS.items()]
    rows = [(words, size) for words, size in rows if size]
    if not rows:
        return []
    of = (
        f" of pipeline rank {found.breakdown.slowest_rank}"
        if len(found.breakdown.ranks) > 1
        else ""
    )
    cells = [(words, format_bytes(round(size))) for words, size in rows]
    return [
        title(f"Moved: what a device{of} hands to collectives in a step"),
        *table_lines(("what", "bytes"), cells, text=(0,), indent="  "),
    ]


def _sum(parts: StepTimeBreakdown, names: tuple[str, ...]) -> float:
    seconds: float = sum(getattr(parts, name) for name in names)
    return seconds


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}"


def _reasons(found: PlanExplanation) -> list[str]:
    header = ("key", "value", "best other", "its step", "")
    rows = [_reason(reason, found.chosen) for reason in found.keys]
    return [title("Why these values"), *table_lines(header, rows, text=(0, 1, 2, 4), indent="  ")]


def _reason(reason: KeyExplanation, chosen: Estimate) -> tuple[str, ...]:
    value = f"{reason.value}{' (pinned)' if reason.pinned else ''}"
    other = reason.other
    if other is None:
        if reason.slow_seconds is not None:
            least = f"{reason.slow_seconds / chosen.time.step_seconds - 1:+.0%}"
            return reason.key, value, "not priced", f"from {least}", "a bound from below"
        refused = reason.refused
        why = "" if refused is None else f"{refused.code}: {refused.reason}"
        return reason.key, value, "none tried" if refused is None else "none runs", "", why
    return (
        reason.key,
        value,
        str(getattr(other.strategy, reason.key)),
        f"{other.slower:+.1%}",
        _loses(other),
    )


def _loses(other: AlternativeLayout) -> str:
    return f"would win by {other.because}" if other.wins else other.because


def _sensitivity(found: PlanExplanation) -> list[str]:
    if not found.sensitivity:
        return []
    step = found.chosen.time.step_seconds
    rows = []
    for each in found.sensitivity:
        best, other = "-", "no layout runs"
        if each.best is not None:
            is_same = each.best.strategy == found.chosen.strategy
            other = "the same layout" if is_same else each.best.strategy.describe()
            best = _change(each.best.time.step_seconds / step - 1)
        rows.append(
            (
                RESOURCE_LABELS[each.resource],
                _change(each.same.time.step_seconds / step - 1),
                best,
                other,
            )
        )
    header = (f"{MORE_FACTOR - 1:.0%} more", "this layout", "the best layout", "")
    return [title("What more would change"), *table_lines(header, rows, text=(0, 3), indent="  ")]


def _change(share: float) -> str:
    return "none" if abs(share) < 5e-4 else f"{share:+.1%}"


def _next(found: PlanExplanation) -> list[str]:
    if not found.next_best:
        return []
    where = " without the pins" if found.next_best_without_pins else ""
    header = ("layout", "GiB", "s/step", "Δ", "")
    rows = [
        (
            e.strategy.describe(),
            f"{e.peak_bytes / GIB:.1f}",
            f"{e.step_seconds:.4g}",
            f"{e.slower:+.1%}",
            _loses(e),
        )
        for e in found.next_best
    ]
    return [title(f"The next best{where}"), *table_lines(header, rows, text=(0, 4), indent="  ")]


def as_object(priced: PricedRecipe, found: PlanExplanation) -> JsonObject:
    """The object of `estimate --json`, with its parts taken apart."""
    from shardwright.cli.estimate_command import estimate_json

    e, breakdown = found.chosen, found.breakdown
    measured = measurements_json(priced.recipe, priced.graph, e.strategy)
    return {
        **({} if measured is None else {"measured": measured}),
        **estimate_json(priced.name, e),
        "goodput": goodput_json(expected_goodput(priced)),
        **islands_json(priced.recipe, priced.graph, e),
        "name": priced.recipe.name,
        "model": {
            "architecture": priced.graph.architecture,
            "parameters": priced.graph.total_parameters,
        },
        "cluster": {
            "nodes": priced.cluster.nodes,
            "gpus_per_node": priced.cluster.gpus_per_node,
            "gpu": priced.cluster.gpu.name,
        },
        "place": found.place,
        "layouts": found.layouts,
        "breakdown": {
            "slowest_pipeline_rank": breakdown.slowest_rank,
            "peak_memory_pipeline_rank": breakdown.peak_memory_rank,
            "step": dataclasses.asdict(breakdown.step),
            "ranks": [_rank_object(rank, priced) for rank in breakdown.ranks],
        },
        "binding": found.binding,
        "rejected_faster_layouts": [
            dataclasses.asdict(each) for each in found.rejected_faster_layouts
        ],
        "other_engine": None
        if found.other_engine is None
        else dataclasses.asdict(found.other_engine),
        "hpz_alternative": None
        if found.hpz_alternative is None
        else dataclasses.asdict(found.hpz_alternative),
        "keys": [dataclasses.asdict(reason) for reason in found.keys],
        "sensitivity": [_sensitivity_object(each, e) for each in found.sensitivity],
        "next_best": [dataclasses.asdict(other) for other in found.next_best],
        "next_best_without_pins": found.next_best_without_pins,
        "rejected": [dataclasses.asdict(region) for region in found.rejected],
        "predicted_by_this_version": priced.plan is None or not priced.has_stale_prediction,
    }


def _sensitivity_object(each: Sensitivity, chosen: Estimate) -> JsonObject:
    def step(time: Time) -> JsonObject:
        return {
            "step_seconds": time.step_seconds,
            "change": time.step_seconds / chosen.time.step_seconds - 1,
        }

    best: JsonObject | None = None
    if each.best is not None:
        is_same = each.best.strategy == chosen.strategy
        best = {
            "strategy": dataclasses.asdict(each.best.strategy),
            **step(each.best.time),
            "is_same_layout": is_same,
        }
    same: JsonObject = {**step(each.same.time), "fits": each.same.memory.fits}
    return {
        "resource": each.resource,
        "factor": MORE_FACTOR,
        "same_layout": same,
        "best_layout": best,
    }


def _rank_object(rank: RankBreakdown, priced: PricedRecipe) -> JsonObject:
    names = [layer.name for layer in priced.graph.layers]
    return {
        "pipeline_rank": rank.pipeline_rank,
        "layers": [names[i] for start, stop in rank.layers for i in range(start, stop)],
        "micro_batches_in_flight": list(rank.in_flight),
        "memory": {**dataclasses.asdict(rank.memory), "peak_bytes": rank.memory.peak_bytes},
        "time": {**dataclasses.asdict(rank.time), "step_seconds": rank.time.total_seconds},
    }

"""Explains a plan: what it is made of and what comes next, and why it is not another layout
(`--why-not`)."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.cli.estimate_command import (
    cluster_json,
    cluster_text,
    diagnostics_json,
    estimate_json,
    goodput_rows,
    islands_cost_of,
    islands_json,
    islands_rows,
    measurement_section_lines,
    measurements_json,
    recovery_rows,
    training_length_text,
)
from shardwright.cli.terminal import labelled_lines, table_lines, title
from shardwright.cost.diloco_costs import (
    DATA_PARALLEL,
    IslandsCost,
    inner_step_seconds,
)
from shardwright.cost.goodput import Goodput, goodput
from shardwright.cost.layout_costs import RankBreakdown, StepTimeBreakdown
from shardwright.cost.scoring_cost import scoring_cost
from shardwright.diagnostics import Diagnostic, Refusal, found, refusal
from shardwright.engines.engine_table import ENGINES
from shardwright.layout.layout import in_layer_axes, in_layer_collectives_text
from shardwright.layout.planning_problem import Problem
from shardwright.recipe.learning_rate_schedules import scheduled_rate
from shardwright.recipe.recipe_types import weights_summary
from shardwright.report.plan_sentences import (
    error_bar_text,
    hpz_text,
    loss_penalty_line,
    objective_lines,
    other_engine_text,
    rejected_faster_text,
)
from shardwright.search.layout_comparison import PARTS, step_part_name
from shardwright.search.plan_explanation import (
    CHOSEN,
    LOSES,
    MORE_FACTOR,
    TOO_LARGE,
    WINS,
    AlternativeLayout,
    HpzAlternative,
    KeyExplanation,
    PlanExplanation,
    Sensitivity,
    WhyNotResult,
    explain,
)
from shardwright.search.recovery_goodput import RecoveryGoodput, recovery_goodput
from shardwright.utils.json_values import JsonDocument, copy_shared_fields, strict_json
from shardwright.utils.number_format import (
    GIB,
    SECONDS_PER_DAY,
    format_bytes,
    format_days,
    format_token_rate,
)

if TYPE_CHECKING:
    from shardwright.cli.command_options import PricedRecipe
    from shardwright.layout.layout_estimate import Estimate, Time
    from shardwright.recipe.recipe_types import Recipe, TrainingSection


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
    "expert_all_to_all": "rows of tokens to their experts and back",
    "context_all_to_all": "tokens for heads around attention",
    "tensor_all_reduce": "activations over tensor ranks, reduced",
    "tensor_all_gather": "activations over tensor ranks, gathered",
    "pipeline_send": "activations and gradients to other pipeline ranks",
    "tied_all_reduce": "the gradient of the tied weights",
    "gradient_reduce": "gradients over data ranks, reduced",
    "parameter_all_gather": "parameters over data ranks, gathered",
    "muon_matrices": "Muon's matrices, gathered and shared out",
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
    """Return the goodput, of a compiled folder with what its run measured of its saves."""
    measured = None if priced.saves is None else priced.saves.gbytes_per_second
    return goodput(copy_shared_fields(Problem, priced), priced.estimate, measured=measured)


def expected_recovery(priced: PricedRecipe) -> RecoveryGoodput | None:
    problem = copy_shared_fields(Problem, priced)
    return recovery_goodput(problem, priced.estimate, expected_goodput(priced))


def explanation_page(priced: PricedRecipe, found: PlanExplanation) -> str:
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
        *(
            ("" if place else "objective", line)
            for place, line in enumerate(
                objective_lines(
                    priced.recipe.training, scoring_cost(copy_shared_fields(Problem, priced), e)
                )
            )
        ),
        *goodput_rows(expected_goodput(priced)),
        *recovery_rows(expected_recovery(priced)),
        *islands_rows(priced.recipe, graph, e),
    ]
    if last_learning_rate_is_zero(priced.recipe.training):
        rows.append(("", "the last step's learning rate is 0 (scheduler.min_lr)"))
    rows.append(("bound by", found.binding))
    rows += [("faster", rejected_faster_text(each)) for each in found.rejected_faster_layouts]
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
    return labelled_lines(rows, 10)


def last_learning_rate_is_zero(training: TrainingSection) -> bool:
    """Return whether the last step trains nothing."""
    from shardwright.plan.plan import resolve_scheduler

    steps = training.step_count_or_zero
    scheduler = resolve_scheduler(training, steps)
    return steps > 0 and scheduled_rate(training.optimizer.lr, scheduler, steps, steps) == 0


def _weights(copy: HpzAlternative, chosen: Estimate, recipe: Recipe) -> str:
    """Return whether each node holds a second copy of the weights (hpZ), and why."""
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
    """Return a table in GiB, one row a pipeline rank."""
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
        if reason.least_seconds is not None:
            least = f"{reason.least_seconds / chosen.time.step_seconds - 1:+.0%}"
            return reason.key, value, "skipped", f"at least {least}", "cannot be faster"
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
            best = _step_change_text(each.best.time.step_seconds / step - 1)
        rows.append(
            (
                RESOURCE_LABELS[each.resource],
                _step_change_text(each.same.time.step_seconds / step - 1),
                best,
                other,
            )
        )
    header = (f"{MORE_FACTOR - 1:.0%} more", "this layout", "the best layout", "")
    return [title("What more would change"), *table_lines(header, rows, text=(0, 3), indent="  ")]


def _step_change_text(share: float) -> str:
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


def explanation_json(priced: PricedRecipe, found: PlanExplanation) -> JsonDocument:
    """Return the object of `estimate --json` with its parts broken down."""
    e, breakdown, cluster = found.chosen, found.breakdown, priced.cluster
    return {
        **measurements_json(priced.recipe, priced.graph, e.strategy),
        **estimate_json(priced.name, e),
        "goodput": expected_goodput(priced),
        "recovery": expected_recovery(priced),
        "scoring": scoring_cost(copy_shared_fields(Problem, priced), e),
        **islands_json(priced.recipe, priced.graph, e),
        "name": priced.recipe.name,
        "model": {
            "architecture": priced.graph.architecture,
            "parameters": priced.graph.total_parameters,
        },
        "cluster": cluster_json(cluster),
        "place": found.place,
        "layouts": found.layouts,
        "breakdown": {
            "slowest_pipeline_rank": breakdown.slowest_rank,
            "peak_memory_pipeline_rank": breakdown.peak_memory_rank,
            "step": breakdown.step,
            "ranks": [_rank_json(rank, priced) for rank in breakdown.ranks],
        },
        "binding": found.binding,
        "rejected_faster_layouts": found.rejected_faster_layouts,
        "other_engine": found.other_engine,
        "hpz_alternative": found.hpz_alternative,
        "keys": found.keys,
        "sensitivity": [_sensitivity_json(each, e) for each in found.sensitivity],
        "next_best": found.next_best,
        "next_best_without_pins": found.next_best_without_pins,
        "rejected": found.rejected,
        "predicted_by_this_version": priced.plan is None or not priced.has_stale_prediction,
    }


def _sensitivity_json(each: Sensitivity, chosen: Estimate) -> JsonDocument:
    def step(time: Time) -> JsonDocument:
        change = time.step_seconds / chosen.time.step_seconds - 1
        return {"step_seconds": time.step_seconds, "change": change}

    best = each.best
    return {
        "resource": each.resource,
        "factor": MORE_FACTOR,
        "same_layout": {**step(each.same.time), "fits": each.same.memory.fits},
        "best_layout": None
        if best is None
        else {
            "strategy": best.strategy,
            **step(best.time),
            "is_same_layout": best.strategy == chosen.strategy,
        },
    }


def _rank_json(rank: RankBreakdown, priced: PricedRecipe) -> JsonDocument:
    names = [layer.name for layer in priced.graph.layers]
    return {
        "pipeline_rank": rank.pipeline_rank,
        "layers": [names[i] for start, stop in rank.layers for i in range(start, stop)],
        "micro_batches_in_flight": rank.in_flight,
        "memory": {**dataclasses.asdict(rank.memory), "peak_bytes": rank.memory.peak_bytes},
        "time": {**dataclasses.asdict(rank.time), "step_seconds": rank.time.total_seconds},
    }


# `--why-not tensor=8,pipeline=2`, and `--why-not islands=4`


TARGET, ISLANDS = "target", "islands"
WHY_NOT_LABEL_WIDTH = 9
MISSING_LINK_CODE = "SW1232"
CROSS_FIELD_CODES = "SW12"
"""Codes of values that are legal alone and contradict each other: they answer the question."""


def run_why_not(name: str, overrides: Sequence[str], words: str, *, as_json: bool) -> int:
    """Return 0 where there is an answer, whichever it is. Raises Refusal for a recipe or a question
    that cannot be read."""
    from shardwright.cli.command_options import read_priced_recipe

    request = parse_why_not_request(words)
    priced = read_priced_recipe(name, overrides)
    if request.get(ISLANDS) == "1" and priced.recipe.cluster.islands > 1:
        return explain_without_islands(priced, request, as_json=as_json)
    answer, ignored_pins = answer_request(priced, overrides, request)
    print(
        strict_json(why_not_json(priced, request, ignored_pins, answer))
        if as_json
        else why_not_page(priced, request, ignored_pins, answer),
        flush=True,
    )
    return 0


_COMMA = re.compile(r",(?![^\[{]*[\]}])")
"""Separates keys; a list of modules has commas inside its brackets."""


def parse_why_not_request(words: str) -> dict[str, str]:
    """Parse `tensor=8,pipeline=2` into keys and values as written. Raises Refusal: SW3303."""
    from shardwright.recipe.recipe_types import ParallelismSection

    known = [*(field.name for field in dataclasses.fields(ParallelismSection)), TARGET, ISLANDS]
    wrong: list[Diagnostic] = []
    request: dict[str, str] = {}
    for part in filter(None, map(str.strip, _COMMA.split(words))):
        key, equals, value = (text.strip() for text in part.partition("="))
        key = key.removeprefix("parallelism.").removeprefix("cluster.")
        if not equals or not value:
            wrong.append(_mistake(f"`{part}` is not key=value", ()))
        elif key not in known:
            wrong.append(_mistake(f"`{key}` is no key of `parallelism`", _nearest(key, known)))
        elif key == TARGET and value not in ENGINES:
            wrong.append(_mistake(f"target: {value} is no engine", tuple(ENGINES)))
        elif key in request:
            wrong.append(_mistake(f"`{key}` is given twice", ()))
        request[key] = value
    if not request:
        wrong.append(_mistake("--why-not names no layout", ()))
    if wrong:
        raise Refusal(*wrong)
    return request


def _mistake(message: str, valid: tuple[str, ...]) -> Diagnostic:
    help = (
        "Write keys of the recipe's `parallelism` section, target, or islands, such as "
        "--why-not tensor=8,pipeline=2."
    )
    return found(
        "SW3303", None, message, help + (f" Did you mean `{valid[0]}`?" if valid else ""), valid
    )


def _nearest(key: str, known: Sequence[str]) -> tuple[str, ...]:
    import difflib

    from shardwright.recipe.recipe_schema import path_of_synonym

    meant = path_of_synonym(key)
    if meant is not None and meant[0] == "parallelism":
        return (meant[-1],)
    return tuple(difflib.get_close_matches(key, known, n=2))


def answer_request(
    priced: PricedRecipe, overrides: Sequence[str], request: Mapping[str, str]
) -> tuple[WhyNotResult, tuple[str, ...]]:
    """Return the answer, and the recipe's pins that the question ignores: it frees every key that
    it does not name."""
    from shardwright.recipe.recipe_loader import load_recipe
    from shardwright.search.engine_choice import problem_under_engine
    from shardwright.search.plan_explanation import pinned_keys, refused, why_not

    ignored_pins = tuple(key for key in pinned_keys(priced.recipe) if key not in request)
    keys = {key: value for key, value in request.items() if key not in (TARGET, ISLANDS)}
    target = request.get(TARGET, priced.recipe.target)
    layout = [f"parallelism.{key}=auto" for key in ignored_pins] + [
        f"parallelism.{k}={v}" for k, v in keys.items()
    ]
    layout += [f"cluster.islands={request[ISLANDS]}"] if ISLANDS in request else []
    path = (
        Path(priced.name, "recipe.resolved.json")
        if os.path.isdir(priced.name)
        else Path(priced.name)
    )
    text = None if priced.name != "-" else priced.recipe.source.texts[priced.recipe.source.file]
    try:
        loaded: Recipe = load_recipe(path, [*overrides, *layout], stdin_text=text)
    except Refusal as refusal:
        if all(d.code.startswith(CROSS_FIELD_CODES) for d in refusal.diagnostics):
            return refused(_with_link_help(refusal, priced)), ignored_pins
        raise
    # What gradients are summed in is decided again: the plan's choice is the plan's.
    dtype = loaded.training.gradient_accumulation_dtype
    training = dataclasses.replace(priced.recipe.training, gradient_accumulation_dtype=dtype)
    recipe = dataclasses.replace(priced.recipe, parallelism=loaded.parallelism, training=training)
    problem = copy_shared_fields(Problem, priced, recipe=recipe)
    if loaded.cluster.islands != priced.recipe.cluster.islands:
        problem = _with_islands_of(problem, loaded)
    if target != priced.recipe.target:
        try:
            problem = problem_under_engine(problem, target)
        except Refusal as refusal:
            return refused(refusal), ignored_pins
    return why_not(problem, priced.estimate), ignored_pins


def _with_link_help(refusal: Refusal, priced: PricedRecipe) -> Refusal:
    """Say how to ask with --set where a recipe without islands names no link between them."""
    if priced.recipe.cluster.islands > 1 or all(
        d.code != MISSING_LINK_CODE for d in refusal.diagnostics
    ):
        return refusal
    help = (
        "Ask the other way round: `--set cluster.islands=N --set "
        "cluster.inter_island_gbits_per_second=RATE --why-not islands=1` prices both."
    )
    told = [
        dataclasses.replace(d, help=help) if d.code == MISSING_LINK_CODE else d
        for d in refusal.diagnostics
    ]
    return Refusal(*told, source=refusal.source)


def _with_islands_of(problem: Problem, loaded: Recipe) -> Problem:
    """Return the problem with the nodes and the batch of one island of `loaded`."""
    from shardwright.layout.gpu_cluster import resolve_cluster

    recipe = dataclasses.replace(problem.recipe, cluster=loaded.cluster, training=loaded.training)
    return dataclasses.replace(problem, recipe=recipe, cluster=resolve_cluster(loaded.cluster))


def why_not_page(
    priced: PricedRecipe,
    request: Mapping[str, str],
    ignored_pins: Sequence[str],
    answer: WhyNotResult,
) -> str:
    asked = " ".join(f"{key}={value}" for key, value in request.items())
    aside = f" (ignored: the recipe's own {', '.join(ignored_pins)})" if ignored_pins else ""
    islands = priced.recipe.cluster.islands
    each = f"{islands} islands, each " if islands > 1 else ""
    best = None if answer.verdict == CHOSEN else answer.estimate
    rows = [
        ("asked", f"{asked}{aside}"),
        ("plan", f"{each}{priced.estimate.strategy.describe()}"),
        *([] if best is None else [("best", best.strategy.describe())]),
        ("answer", verdict_sentence(priced, request, answer)),
    ]
    for d in answer.diagnostics:
        rows.append(("", f"{d.severity}[{d.code}]: {d.message}"))
        rows += [("", f"= help: {d.help}")] if d.help else []
    lines = labelled_lines(rows, WHY_NOT_LABEL_WIDTH)
    if best is not None:
        lines += ["", *_figures(priced.estimate, best)]
    if answer.estimate is not None and int(request.get(ISLANDS, 1)) > 1:
        lines += ["", loss_penalty_line(int(request[ISLANDS]))]
    return "\n".join(lines)


def verdict_sentence(priced: PricedRecipe, request: Mapping[str, str], answer: WhyNotResult) -> str:
    found = answer.estimate
    if found is None:
        return f"it cannot be: {answer.because}"
    change = found.time.step_seconds / priced.estimate.time.step_seconds - 1
    peak, capacity = found.memory.peak_bytes / GIB, found.memory.capacity_bytes / GIB
    codes = ", ".join(d.code for d in answer.diagnostics if d.severity == "error")
    own = str(priced.recipe.cluster.islands)
    kept = (
        "pins keep it out" if request.get(ISLANDS, own) == own else "cluster.islands keeps it out"
    )
    longer = f"{abs(change):.1%} {'longer' if change >= 0 else 'shorter'}"
    said = {
        CHOSEN: "it is: the plan's layout is the best one of that region",
        TOO_LARGE: f"it does not fit: the least that it takes is {peak:.1f} of {capacity:.1f} GiB",
        LOSES: f"it runs, and loses: {longer}; {answer.because}",
        WINS: f"it runs, and is better ({longer}; the plan's {answer.because}): {kept}",
    }
    no = f"it does not run: {codes}. Were it to run, its step would be {longer}"
    return said.get(answer.verdict, no)


def _figures(plan: Estimate, other: Estimate) -> list[str]:
    """Part by part, the plan's and the other's."""
    figures: list[tuple[str, float, float]] = []
    for name in PARTS:
        ours, theirs = getattr(plan.time, name), getattr(other.time, name)
        if ours or theirs:
            part = step_part_name(name, plan.strategy, other.strategy)
            figures.append((f"{part}, ms", ours * 1e3, theirs * 1e3))
    step = (plan.time.step_seconds * 1e3, other.time.step_seconds * 1e3)
    peak = (plan.memory.peak_bytes / GIB, other.memory.peak_bytes / GIB)
    figures.append(("the step, ms", *step))
    figures.append((f"peak memory, GiB of {plan.memory.capacity_bytes / GIB:.1f}", *peak))
    rows = [
        (name, f"{ours:,.1f}", f"{theirs:,.1f}", f"{theirs - ours:+,.1f}")
        for name, ours, theirs in figures
    ]
    return table_lines(("", "plan", "asked", "difference"), rows, text=(0,))


def why_not_json(
    priced: PricedRecipe,
    request: Mapping[str, str],
    ignored_pins: Sequence[str],
    answer: WhyNotResult,
) -> JsonDocument:
    plan, found = priced.estimate, answer.estimate
    document: JsonDocument = {
        "recipe": priced.name,
        "asked": request,
        "ignored_pins": ignored_pins,
        "verdict": answer.verdict,
        "answer": verdict_sentence(priced, request, answer),
        "because": answer.because,
        "diagnostics": diagnostics_json(answer.diagnostics),
        "plan": estimate_json(priced.name, plan),
        "estimate": None if found is None else estimate_json(priced.name, found),
    }
    if found is None:
        return document
    return {
        **document,
        "difference": {
            "slower": found.time.step_seconds / plan.time.step_seconds - 1,
            "step_seconds": found.time.step_seconds - plan.time.step_seconds,
            "peak_bytes": found.memory.peak_bytes - plan.memory.peak_bytes,
            **{name: getattr(found.time, name) - getattr(plan.time, name) for name in PARTS},
        },
    }


# `--why-not islands=1`: all nodes as one world, its gradients over the slow links


def explain_without_islands(
    priced: PricedRecipe, request: Mapping[str, str], *, as_json: bool
) -> int:
    """Raises Refusal: SW3303 where other keys are asked about beside it."""
    others = [key for key in request if key != "islands"]
    if others:
        raise refusal(
            "SW3303",
            f"islands=1 keeps the layout of an island, and `{others[0]}` asks for another",
            "Ask `--why-not islands=1` alone.",
        )
    cost = islands_cost_of(priced.recipe, priced.graph, priced.estimate)
    assert cost is not None, "the recipe has islands"
    verdict = WINS if cost.take == DATA_PARALLEL else LOSES
    document = {
        "recipe": priced.name,
        "asked": request,
        "ignored_pins": [],
        "verdict": verdict,
        "answer": without_islands_answer(cost),
        "because": gradient_traffic_text(cost),
        "diagnostics": [],
        "islands": cost,
        "loss": loss_penalty_line(cost.islands),
    }
    print(strict_json(document) if as_json else without_islands_text(priced, cost), flush=True)
    return 0


def gradient_traffic_text(cost: IslandsCost) -> str:
    return (
        f"{format_bytes(round(cost.gradient_bytes))} of gradients each way in every step take "
        f"{cost.gradient_seconds:.3g} s of a link of {cost.link_gbits_per_second:g} Gbit/s"
    )


def without_islands_answer(cost: IslandsCost) -> str:
    at_best, step = cost.data_parallel_step_seconds, cost.step_seconds
    change = f"{abs(at_best / step - 1):.1%} {'longer' if at_best > step else 'shorter'} at best"
    if cost.take == DATA_PARALLEL:
        return (
            f"it runs, and is better where its gradients hide behind the step ({change}): take "
            "plain data parallelism"
        )
    return f"it runs, and loses: {change}; take islands"


def without_islands_text(priced: PricedRecipe, cost: IslandsCost) -> str:
    s, cluster = priced.estimate.strategy, priced.cluster
    inner, n = inner_step_seconds(priced.estimate.time), cost.islands
    at_best, longest = cost.data_parallel_step_seconds, cost.data_parallel_longest_seconds
    columns = (cost.step_seconds, at_best, longest)
    rows = [
        ("a step inside an island, s", *(f"{inner:,.4g}",) * 3),
        ("training waits for the link, s a step", *(f"{each - inner:,.4g}" for each in columns)),
        ("the step, s", *(f"{each:,.4g}" for each in columns)),
    ]
    if (steps := priced.recipe.training.step_count_or_zero) > 0:
        rows.append(
            ("the training", *(format_days(steps * each / SECONDS_PER_DAY) for each in columns))
        )
    header = ("", f"{n} islands", "one world, gradients hidden", "one world, none hidden")
    codes = [d.code for d in priced.estimate.diagnostics if d.severity == "error"]
    broken = f" (it does not run: {', '.join(codes)})" if codes else ""
    answer = [
        (
            "asked",
            f"islands=1: {cluster.nodes * n} x {cluster.gpus_per_node} {cluster.gpu.name} as one "
            f"world, with data={s.data * n}: plain data parallelism over the links between islands",
        ),
        ("plan", f"{n} islands, each {s.describe()}{broken}"),
        ("answer", without_islands_answer(cost)),
        ("", gradient_traffic_text(cost)),
    ]
    lines = [
        *labelled_lines(answer, WHY_NOT_LABEL_WIDTH),
        "",
        *table_lines(header, rows, text=(0,)),
        "",
        loss_penalty_line(n),
    ]
    return "\n".join(lines)

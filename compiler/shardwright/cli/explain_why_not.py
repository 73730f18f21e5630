"""`shardwright explain DIR|R --why-not tensor=8,pipeline=2`, and `--why-not islands=4`; of
islands=1 see why_not_one_world.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.cli.plan_command import GIB
from shardwright.cli.terminal import table_lines
from shardwright.cost.diloco_costs import (
    DATA_PARALLEL,
    IslandsCost,
    inner_step_seconds,
    islands_cost,
)
from shardwright.diagnostics import Diagnostic, Refusal, found, refusal
from shardwright.engines.engine_table import ENGINES
from shardwright.layout.planning_problem import Problem
from shardwright.report.plan_sentences import loss_penalty_line
from shardwright.search.layout_comparison import PARTS, step_part_name
from shardwright.search.plan_explanation import CHOSEN, LOSES, TOO_LARGE, WINS, WhyNotResult
from shardwright.utils.json_records import copy_shared_fields
from shardwright.utils.json_values import strict_json
from shardwright.utils.number_format import SECONDS_PER_DAY, format_bytes, format_days

if TYPE_CHECKING:
    from shardwright.cli.command_options import PricedRecipe
    from shardwright.layout.layout_estimate import Estimate
    from shardwright.recipe.recipe_types import Recipe
    from shardwright.utils.json_values import JsonObject


TARGET, ISLANDS = "target", "islands"
MISSING_LINK_CODE = "SW1232"
CROSS_FIELD_CODES = "SW12"
"""What stage 1 says of values that are each legal and do not go together: an answer, not a mistyped
question."""


def run_why_not(name: str, overrides: Sequence[str], words: str, *, as_json: bool) -> int:
    """0 where there is an answer, whichever it is. Raises Refusal for a recipe or a question that
    cannot be read."""
    from shardwright.cli.command_options import read_priced_recipe

    request = parse_why_not_request(words)
    priced = read_priced_recipe(name, overrides)
    if request.get(ISLANDS) == "1" and priced.recipe.cluster.islands > 1:
        return explain_without_islands(priced, request, as_json=as_json)
    answer, ignored_pins = answer_request(priced, overrides, request)
    print(
        strict_json(as_object(priced, request, ignored_pins, answer))
        if as_json
        else why_not_page(priced, request, ignored_pins, answer),
        flush=True,
    )
    return 0


def parse_why_not_request(words: str) -> dict[str, str]:
    """`tensor=8,pipeline=2` -> key -> value, as written. Raises Refusal: SW3303."""
    from shardwright.recipe.recipe_types import ParallelismSection

    known = [*(field.name for field in dataclasses.fields(ParallelismSection)), TARGET, ISLANDS]
    wrong: list[Diagnostic] = []
    request: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in words.split(","))):
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
    """The answer, and the keys that the recipe pins and the question sets aside: all of the layout
    that it does not name is free."""
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
    recipe = dataclasses.replace(priced.recipe, parallelism=loaded.parallelism)
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
    """A recipe of one world says nothing of a link between islands: --set asks the question the
    other way round."""
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
    """Its nodes and batch are those of one of them."""
    from shardwright.cluster.gpu_catalogue import resolve_cluster

    recipe = dataclasses.replace(problem.recipe, cluster=loaded.cluster, training=loaded.training)
    return dataclasses.replace(problem, recipe=recipe, cluster=resolve_cluster(loaded.cluster))


def why_not_page(
    priced: PricedRecipe,
    request: Mapping[str, str],
    ignored_pins: Sequence[str],
    answer: WhyNotResult,
) -> str:
    lines = [f"asked    {' '.join(f'{key}={value}' for key, value in request.items())}"]
    if ignored_pins:
        lines[0] += f" (set aside: the recipe's own {', '.join(ignored_pins)})"
    lines.append(f"plan     {_of_islands(priced.recipe)}{priced.estimate.strategy.describe()}")
    if answer.estimate is not None and answer.verdict != CHOSEN:
        lines.append(f"best     {answer.estimate.strategy.describe()}")
    lines.append(f"answer   {verdict_sentence(priced, request, answer)}")
    for d in answer.diagnostics:
        lines.append(f"         {d.severity}[{d.code}]: {d.message}")
        lines += [f"         = help: {d.help}"] if d.help else []
    if answer.estimate is not None and answer.verdict != CHOSEN:
        lines += ["", *_figures(priced.estimate, answer.estimate)]
    if answer.estimate is not None and int(request.get(ISLANDS, 1)) > 1:
        lines += ["", loss_penalty_line(int(request[ISLANDS]))]
    return "\n".join(lines)


def _of_islands(recipe: Recipe) -> str:
    return f"{recipe.cluster.islands} islands, each " if recipe.cluster.islands > 1 else ""


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
    said = {
        CHOSEN: "it is: the plan's layout is the best one of that region",
        TOO_LARGE: f"it does not fit: the least that it takes is {peak:.1f} of {capacity:.1f} GiB",
        LOSES: f"it runs, and loses: {_change(change)}; {answer.because}",
        WINS: f"it runs, and is better ({_change(change)}; the plan's {answer.because}): {kept}",
    }
    return said.get(
        answer.verdict,
        f"it does not run: {codes}. Were it to run, its step would be {_change(change)}",
    )


def _change(share: float) -> str:
    return f"{abs(share):.1%} {'longer' if share >= 0 else 'shorter'}"


def _figures(plan: Estimate, other: Estimate) -> list[str]:
    """Part by part, the plan's and the other's."""
    rows: list[tuple[str, ...]] = []
    for name in PARTS:
        ours, theirs = getattr(plan.time, name), getattr(other.time, name)
        if ours or theirs:
            words = step_part_name(name, plan.strategy, other.strategy)
            rows.append(_row(f"{words}, ms", ours * 1e3, theirs * 1e3))
    rows.append(_row("the step, ms", plan.time.step_seconds * 1e3, other.time.step_seconds * 1e3))
    peak = f"peak memory, GiB of {plan.memory.capacity_bytes / GIB:.1f}"
    rows.append(_row(peak, plan.memory.peak_bytes / GIB, other.memory.peak_bytes / GIB))
    return table_lines(("", "plan", "asked", "difference"), rows, text=(0,))


def _row(words: str, ours: float, theirs: float) -> tuple[str, ...]:
    return words, f"{ours:,.1f}", f"{theirs:,.1f}", f"{theirs - ours:+,.1f}"


def as_object(
    priced: PricedRecipe,
    request: Mapping[str, str],
    ignored_pins: Sequence[str],
    answer: WhyNotResult,
) -> JsonObject:
    from shardwright.cli.estimate_command import diagnostics_json, estimate_json

    plan, found = priced.estimate, answer.estimate
    document: JsonObject = {
        "recipe": priced.name,
        "asked": dict(request),
        "rejected_faster_layouts": list(ignored_pins),
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


# `shardwright explain DIR|R --why-not islands=1`: all nodes as one world, its gradients over the
# slow links.


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
    step = inner_step_seconds(priced.estimate.time)
    cost = islands_cost(priced.recipe, priced.graph.total_parameters, step)
    assert cost is not None, "asked for before"
    verdict = WINS if cost.take == DATA_PARALLEL else LOSES
    document = {
        "recipe": priced.name,
        "asked": dict(request),
        "rejected_faster_layouts": [],
        "verdict": verdict,
        "answer": without_islands_answer(cost),
        "because": gradient_traffic_text(cost),
        "diagnostics": [],
        "islands": dataclasses.asdict(cost),
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


def _not_run(priced: PricedRecipe) -> str:
    codes = [d.code for d in priced.estimate.diagnostics if d.severity == "error"]
    return f" (it does not run: {', '.join(codes)})" if codes else ""


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
    return "\n".join(
        [
            f"asked    islands=1: {cluster.nodes * n} x {cluster.gpus_per_node} {cluster.gpu.name} "
            f"as one world, with data={s.data * n}: plain data parallelism over the links between "
            "islands",
            f"plan     {n} islands, each {s.describe()}{_not_run(priced)}",
            f"answer   {without_islands_answer(cost)}",
            f"         {gradient_traffic_text(cost)}",
            "",
            *table_lines(header, rows, text=(0,)),
            "",
            loss_penalty_line(n),
        ]
    )

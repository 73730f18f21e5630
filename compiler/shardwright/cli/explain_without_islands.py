"""`shardwright explain DIR|R --why-not islands=1`: all nodes as one world, its gradients over the
slow links."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from shardwright.cli.terminal_tables import table_lines
from shardwright.cost.diloco_costs import (
    DATA_PARALLEL,
    IslandsCost,
    inner_step_seconds,
    islands_cost,
    loss_penalty_line,
)
from shardwright.diagnostics import refusal
from shardwright.search.why_not_answer import LOSES, WINS
from shardwright.utils.number_format import SECONDS_PER_DAY, format_bytes, format_days
from shardwright.utils.strict_json import strict_json

if TYPE_CHECKING:
    from shardwright.cli.priced_recipe import PricedRecipe


def run(priced: PricedRecipe, request: Mapping[str, str], *, as_json: bool) -> int:
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

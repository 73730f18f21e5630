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
    inner_seconds,
    islands_cost,
    penalty_words,
)
from shardwright.diagnostics import refusal
from shardwright.search.why_not_answer import LOSES, WINS
from shardwright.utils.number_format import SECONDS_PER_DAY, duration, file_size
from shardwright.utils.strict_json import strict_json

if TYPE_CHECKING:
    from shardwright.cli.priced_recipe import PricedRecipe


def run(subject: PricedRecipe, asked: Mapping[str, str], *, as_json: bool) -> int:
    """Raises Refusal: SW3303 where other keys are asked about beside it."""
    others = [key for key in asked if key != "islands"]
    if others:
        raise refusal(
            "SW3303",
            f"islands=1 keeps the layout of an island, and `{others[0]}` asks for another",
            "Ask `--why-not islands=1` alone.",
        )
    step = inner_seconds(subject.estimate.time)
    found = islands_cost(subject.recipe, subject.graph.total_parameters, step)
    assert found is not None, "asked for before"
    verdict = WINS if found.take == DATA_PARALLEL else LOSES
    document = {
        "recipe": subject.name,
        "asked": dict(asked),
        "set_aside": [],
        "verdict": verdict,
        "answer": answer_words(found),
        "because": gradient_words(found),
        "diagnostics": [],
        "islands": dataclasses.asdict(found),
        "loss": penalty_words(found.islands),
    }
    print(strict_json(document) if as_json else page(subject, found), flush=True)
    return 0


def gradient_words(found: IslandsCost) -> str:
    return (
        f"{file_size(round(found.gradient_bytes))} of gradients each way in every step take "
        f"{found.gradient_seconds:.3g} s of a link of {found.link_gbits_per_second:g} Gbit/s"
    )


def answer_words(found: IslandsCost) -> str:
    at_best, step = found.data_parallel_step_seconds, found.step_seconds
    change = f"{abs(at_best / step - 1):.1%} {'longer' if at_best > step else 'shorter'} at best"
    if found.take == DATA_PARALLEL:
        return (
            f"it runs, and is better where its gradients hide behind the step ({change}): take "
            "plain data parallelism"
        )
    return f"it runs, and loses: {change}; take islands"


def _not_run(subject: PricedRecipe) -> str:
    codes = [d.code for d in subject.estimate.diagnostics if d.severity == "error"]
    return f" (it does not run: {', '.join(codes)})" if codes else ""


def page(subject: PricedRecipe, found: IslandsCost) -> str:
    s, cluster = subject.estimate.strategy, subject.cluster
    inner, n = inner_seconds(subject.estimate.time), found.islands
    at_best, longest = found.data_parallel_step_seconds, found.data_parallel_longest_seconds
    columns = (found.step_seconds, at_best, longest)
    rows = [
        ("a step inside an island, s", *(f"{inner:,.4g}",) * 3),
        ("training waits for the link, s a step", *(f"{each - inner:,.4g}" for each in columns)),
        ("the step, s", *(f"{each:,.4g}" for each in columns)),
    ]
    if (steps := subject.recipe.training.known_steps) > 0:
        rows.append(
            ("the training", *(duration(steps * each / SECONDS_PER_DAY) for each in columns))
        )
    header = ("", f"{n} islands", "one world, gradients hidden", "one world, none hidden")
    return "\n".join(
        [
            f"asked    islands=1: {cluster.nodes * n} x {cluster.gpus_per_node} {cluster.gpu.name} "
            f"as one world, with data={s.data * n}: plain data parallelism over the links between "
            "islands",
            f"plan     {n} islands, each {s.describe()}{_not_run(subject)}",
            f"answer   {answer_words(found)}",
            f"         {gradient_words(found)}",
            "",
            *table_lines(header, rows, text=(0,)),
            "",
            penalty_words(n),
        ]
    )

"""What an outer step between islands costs, and the same run as plain data parallelism over them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from shardwright.ir.model_graph import ModelGraph
from shardwright.ir.recipe import ELEMENT_BYTES, Recipe
from shardwright.layout.estimate import Time

ISLANDS, DATA_PARALLEL = "islands", "data parallel"


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandsCost:
    """sent_bytes: each way over the store's link, an outer step. outer_seconds: that they take. exposed_seconds: that
    training waits of them, an outer step; exposed_share: of the time of the steps between two of them.

    data_parallel_step_seconds: of the same run as plain data parallelism over the same links, at best: every gradient
    is sent in bf16 behind the whole step. take: the faster of the two, plain data parallelism where they are equal.
    """

    islands: int
    every_steps: int
    sent_bytes: float
    outer_seconds: float
    exposed_seconds: float
    exposed_share: float
    step_seconds: float
    data_parallel_step_seconds: float
    take: str


def islands_cost(recipe: Recipe, parameters: int, inner_seconds: float) -> IslandsCost | None:
    """parameters: of the whole model. inner_seconds: of a step inside an island. None without islands.

    The store adds the deltas up, beside one of the islands: its link carries those of the n - 1 others, and their sum
    back at the same time, so that T = 8 (n - 1) N / W for N bytes of deltas over W bit/s. Exposed is what the steps
    that run meanwhile (overlap_steps) do not cover. A ring of data parallelism sends 2 (n - 1) / n N (arXiv 1802.05799)
    in each step. Assumes a link that reaches its rate, and no time for the sums.
    """
    outer, cluster = recipe.training.outer, recipe.cluster
    rate = cluster.inter_island_gbits_per_second
    if outer is None or rate is None:
        return None
    n, link = cluster.islands, rate * 1e9 / 8
    sent = (n - 1) * parameters * ELEMENT_BYTES[outer.precision]
    seconds = sent / link
    exposed = max(0.0, seconds - outer.overlap_steps * inner_seconds)
    ring = 2 * (n - 1) / n * parameters * ELEMENT_BYTES["bf16"] / link
    step, plain = inner_seconds + exposed / outer.every_steps, max(inner_seconds, ring)
    return IslandsCost(
        islands=n,
        every_steps=outer.every_steps,
        sent_bytes=float(sent),
        outer_seconds=seconds,
        exposed_seconds=exposed,
        exposed_share=exposed / (outer.every_steps * inner_seconds),
        step_seconds=step,
        data_parallel_step_seconds=plain,
        take=DATA_PARALLEL if plain <= step else ISLANDS,
    )


def with_outer_step(time: Time, recipe: Recipe, graph: ModelGraph) -> Time:
    """The step's share of an outer step added."""
    found = islands_cost(recipe, graph.total_parameters, time.step_seconds)
    if found is None:
        return time
    slower = time.step_seconds / found.step_seconds
    rates = ("tokens_per_second_per_gpu", "model_tflops_per_gpu", "hardware_tflops_per_gpu", "mfu")
    return dataclasses.replace(
        time,
        step_seconds=found.step_seconds,
        outer_comm_seconds=found.exposed_seconds / found.every_steps,
        **{name: getattr(time, name) * slower for name in rates},
    )


def inner_seconds(time: Time) -> float:
    """Of a step without its share of the outer step."""
    return time.step_seconds - time.outer_comm_seconds


PENALTY = (
    "loss beside data parallelism, the papers' and not this run's (arXiv 2503.09799, tuned, an outer step every 30): "
    "2 islands +0.2 % at 1.3B parameters, -0.18 % at 4B, -0.19 % at 10B; 4 islands +0.5 / +0.18 / +0.29 %; 8 islands "
    "+1.3 % at 1.3B"
)


def islands_words(found: IslandsCost) -> list[str]:
    """Lines for `estimate`, `explain`, `compile` and the report."""
    plain, step = found.data_parallel_step_seconds, found.step_seconds
    compared = f"as plain data parallelism over the same links at best {plain:.4g} s a step, this {step:.4g} s: take "
    if found.take == ISLANDS:
        compared += "islands"
    else:
        compared += "plain data parallelism, which hides its gradients here (cluster.islands: 1)"
    return [
        f"{found.islands}, an outer step every {found.every_steps}: {found.sent_bytes / 1e9:.3g} GB each way over the "
        f"store's link, {found.outer_seconds:.3g} s, of which training waits {found.exposed_seconds:.3g} s "
        f"({found.exposed_share:.1%} of the steps between)",
        compared,
        PENALTY,
    ]

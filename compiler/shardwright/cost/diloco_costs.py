"""Estimate an outer step between DiLoCo islands, and plain data parallelism over the same links."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from shardwright.layout.formats import element_bytes
from shardwright.layout.layout_estimate import Time
from shardwright.models.model_graph import ModelGraph
from shardwright.recipe.recipe_types import Recipe
from shardwright.utils.number_format import SECONDS_PER_DAY

ISLANDS, DATA_PARALLEL = "islands", "data parallel"


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandsCost:
    """Compare DiLoCo islands with plain data parallelism over the same links.

    Both keep a layout's other collectives inside an island.

    sent_bytes: each way over the store's link, by outer step
    outer_seconds: the transfer of an outer step
    exposed_seconds: the part of an outer step that training waits for
    exposed_share: exposed_seconds over the time of the steps between two outer steps
    gradient_bytes, gradient_seconds: plain data parallelism's transfer, each way, in every step
    data_parallel_step_seconds: where all of that transfer overlaps with the step
    data_parallel_longest_seconds: where none of it does
    days, data_parallel_days: the whole training, the latter at best; None where the steps are not
        known
    take: the faster of the two; plain data parallelism where they are equal
    """

    islands: int
    every_steps: int
    link_gbits_per_second: float
    sent_bytes: float
    outer_seconds: float
    exposed_seconds: float
    exposed_share: float
    step_seconds: float
    gradient_bytes: float
    gradient_seconds: float
    data_parallel_step_seconds: float
    data_parallel_longest_seconds: float
    days: float | None
    data_parallel_days: float | None
    take: str


def islands_cost(recipe: Recipe, parameters: int, inner_step_seconds: float) -> IslandsCost | None:
    """Estimate the islands of a recipe; None where it has none.

    The store adds up the deltas beside one island. Its link carries those of the n - 1 others, and
    their sum back at the same time: T = 8 (n - 1) N / W for N bytes of deltas over W bit/s. The
    part that the steps in the meantime (overlap_steps) do not cover is exposed. A ring of data
    parallelism sends 2 (n - 1) / n N (arXiv 1802.05799) in each step. Assumes a link at its full
    rate, and no time for the sums.

    parameters: of the whole model
    inner_step_seconds: a step inside an island
    """
    outer, cluster = recipe.training.outer, recipe.cluster
    rate = cluster.inter_island_gbits_per_second
    if outer is None or rate is None:
        return None
    n, link = cluster.islands, rate * 1e9 / 8
    sent = (n - 1) * parameters * element_bytes(outer.precision)
    seconds = sent / link
    exposed = max(0.0, seconds - outer.overlap_steps * inner_step_seconds)
    gradients = 2 * (n - 1) / n * parameters * element_bytes("bf16")
    step, plain = (
        inner_step_seconds + exposed / outer.every_steps,
        max(inner_step_seconds, gradients / link),
    )
    steps = recipe.training.step_count_or_zero
    return IslandsCost(
        islands=n,
        every_steps=outer.every_steps,
        link_gbits_per_second=rate,
        sent_bytes=float(sent),
        outer_seconds=seconds,
        exposed_seconds=exposed,
        exposed_share=exposed / (outer.every_steps * inner_step_seconds),
        step_seconds=step,
        gradient_bytes=gradients,
        gradient_seconds=gradients / link,
        data_parallel_step_seconds=plain,
        data_parallel_longest_seconds=inner_step_seconds + gradients / link,
        days=steps * step / SECONDS_PER_DAY if steps else None,
        data_parallel_days=steps * plain / SECONDS_PER_DAY if steps else None,
        take=DATA_PARALLEL if plain <= step else ISLANDS,
    )


def with_outer_step(time: Time, recipe: Recipe, graph: ModelGraph) -> Time:
    """Add the step's share of an outer step."""
    if recipe.training.outer is None:
        return time
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


def inner_step_seconds(time: Time) -> float:
    """Return a step without its share of the outer step."""
    return time.step_seconds - time.outer_comm_seconds

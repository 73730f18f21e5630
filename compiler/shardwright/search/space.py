"""The layouts to try: tensor x pipeline x data x ZeRO x micro-batch x checkpointing x schedule, pins respected."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from shardwright.ir.cluster import Cluster
from shardwright.ir.model_graph import ModelGraph
from shardwright.ir.recipe import Recipe
from shardwright.layout.divisors import divisors
from shardwright.layout.strategy import Strategy

ZERO_STAGES = (0, 1, 2, 3)
CHECKPOINTING = ("none", "selective", "full")
SCHEDULES = ("1f1b", "dualpipev")
OFFLOAD = ("none", "optimizer", "parameters")
LARGEST_MICRO_BATCH = 64  # larger ones gain nothing: the matrices are full long before

T = TypeVar("T", int, str)


Value = int | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Degrees that fill the cluster, and the values that the other keys can take there: `axes`, in the order in which
    a search settles them. The last is micro_batch_size, smallest first, so that memory only grows along it."""

    tensor: int
    pipeline: int
    data: int
    axes: tuple[tuple[str, tuple[Value, ...]], ...]


def placements(recipe: Recipe, graph: ModelGraph, cluster: Cluster) -> Iterator[Placement]:
    """Every (tensor, pipeline, data) whose product is the world and whose data degree divides the batch.

    Tensor groups stand inside a node; pipeline and data degrees go across. Nothing where the pins themselves do not
    multiply out (see `nearest`).
    """
    pins = recipe.parallelism
    world, rest = divmod(cluster.world_size, pins.context)
    if rest:
        return
    batch = recipe.training.global_batch_size
    for tensor in _values(pins.tensor, divisors(cluster.gpus_per_node)):
        deepest = [p for p in divisors(world) if p <= len(graph.layers)]
        for pipeline in _values(pins.pipeline, tuple(deepest)):
            if world % (tensor * pipeline):
                continue
            data = world // (tensor * pipeline)
            if pins.data not in (None, data) or batch % data:
                continue
            per_rank = batch // data
            micro_batches = tuple(n for n in divisors(per_rank) if n <= LARGEST_MICRO_BATCH)
            micro_batches = tuple(n for n in _values(pins.micro_batch_size, micro_batches) if per_rank % n == 0)
            if micro_batches:
                yield Placement(
                    tensor=tensor,
                    pipeline=pipeline,
                    data=data,
                    axes=(
                        ("zero_stage", _values(pins.zero_stage, ZERO_STAGES)),
                        # `auto` never offloads into memory whose size it is not told.
                        ("offload", _values(pins.offload, OFFLOAD if cluster.host_memory_bytes else OFFLOAD[:1])),
                        ("schedule", _values(pins.schedule, SCHEDULES if pipeline > 1 else SCHEDULES[:1])),
                        ("activation_checkpointing", _values(pins.activation_checkpointing, CHECKPOINTING)),
                        ("micro_batch_size", micro_batches),
                    ),
                )


def candidates(recipe: Recipe, graph: ModelGraph, cluster: Cluster) -> Iterator[Strategy]:
    """Every layout of every placement; the rules decide about them."""
    for placement in placements(recipe, graph, cluster):
        names = [name for name, _ in placement.axes]
        for values in itertools.product(*(choices for _, choices in placement.axes)):
            yield strategy_of(recipe, placement, dict(zip(names, values, strict=True)))


def strategy_of(recipe: Recipe, placement: Placement, settled: Mapping[str, Value]) -> Strategy:
    """Keys that are not settled yet stand at their first value."""
    values = {name: settled.get(name, choices[0]) for name, choices in placement.axes}
    micro_batch = int(values["micro_batch_size"])
    return _strategy(
        recipe,
        tensor=placement.tensor,
        pipeline=placement.pipeline,
        data=placement.data,
        zero_stage=int(values["zero_stage"]),
        micro_batch_size=micro_batch,
        accumulation=recipe.training.global_batch_size // (micro_batch * placement.data),
        checkpointing=str(values["activation_checkpointing"]),
        schedule=str(values["schedule"]),
        offload=str(values["offload"]),
    )


def nearest(recipe: Recipe, cluster: Cluster) -> Strategy:
    """The pinned layout with plain values for the rest, whether or not it multiplies out: what the rules explain."""
    pins = recipe.parallelism
    tensor, pipeline = pins.tensor or 1, pins.pipeline or 1
    world, rest = divmod(cluster.world_size, pins.context)
    data = pins.data or max(1, world // (tensor * pipeline))
    if not rest and pins.tensor is None and world % (pipeline * data) == 0:
        tensor = world // (pipeline * data)
    elif not rest and pins.pipeline is None and world % (tensor * data) == 0:
        pipeline = world // (tensor * data)
    micro_batch = pins.micro_batch_size or 1
    return _strategy(
        recipe,
        tensor=tensor,
        pipeline=pipeline,
        data=data,
        zero_stage=1 if pins.zero_stage is None else pins.zero_stage,
        micro_batch_size=micro_batch,
        accumulation=max(1, recipe.training.global_batch_size // (micro_batch * data)),
        checkpointing=pins.activation_checkpointing or "none",
        schedule=pins.schedule or "1f1b",
        offload=pins.offload or OFFLOAD[0],
    )


def without_layout_pins(recipe: Recipe) -> Recipe:
    """`offload` stays: a search that was not asked for it does not move states to the host."""
    pins = dataclasses.replace(
        recipe.parallelism,
        tensor=None,
        pipeline=None,
        data=None,
        zero_stage=None,
        micro_batch_size=None,
        activation_checkpointing=None,
        schedule=None,
    )
    return dataclasses.replace(recipe, parallelism=pins)


def as_today(recipe: Recipe, *, zero_stage: int) -> Recipe:
    """The same run as people run it today: no tensor or pipeline parallelism, this ZeRO stage."""
    free = without_layout_pins(recipe)
    pins = dataclasses.replace(free.parallelism, tensor=1, pipeline=1, zero_stage=zero_stage, schedule="1f1b")
    return dataclasses.replace(free, parallelism=pins)


def _strategy(
    recipe: Recipe,
    *,
    tensor: int,
    pipeline: int,
    data: int,
    zero_stage: int,
    micro_batch_size: int,
    accumulation: int,
    checkpointing: str,
    schedule: str,
    offload: str,
) -> Strategy:
    pins = recipe.parallelism
    return Strategy(
        tensor=tensor,
        pipeline=pipeline,
        data=data,
        zero_stage=zero_stage,
        micro_batch_size=micro_batch_size,
        gradient_accumulation_steps=accumulation,
        activation_checkpointing=checkpointing,
        schedule=schedule,
        offload=offload,
        expert=pins.expert,
        context=pins.context,
        virtual_stages=pins.virtual_stages,
        sequence_parallel=pins.sequence_parallel,
        loss="chunked" if recipe.model.loss == "chunked" else "full",  # auto: search.settle
    )


def _values(pin: T | None, choices: tuple[T, ...]) -> tuple[T, ...]:
    return choices if pin is None else (pin,)

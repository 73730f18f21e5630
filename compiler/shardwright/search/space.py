"""The layouts to try: tensor x pipeline x data x ZeRO x micro-batch x checkpointing x schedule, pins respected."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TypeVar

from shardwright.ir.cluster import Cluster
from shardwright.ir.divisors import divisors
from shardwright.ir.model_graph import ModelGraph
from shardwright.ir.recipe import ParallelismSection, Recipe
from shardwright.ir.strategy import Strategy

ZERO_STAGES = (0, 1, 2, 3)
CHECKPOINTING = ("none", "selective", "full")
SCHEDULES = ("1f1b", "dualpipev")
LARGEST_MICRO_BATCH = 64  # larger ones gain nothing: the matrices are full long before

T = TypeVar("T", int, str)


def candidates(recipe: Recipe, graph: ModelGraph, cluster: Cluster) -> Iterator[Strategy]:
    """Every layout whose product is the world and whose batch divides; the rules decide about the rest.

    Nothing where the pins themselves do not multiply out (see `nearest`).
    """
    pins, world = recipe.parallelism, cluster.world_size
    batch = recipe.training.global_batch_size
    for tensor in _values(pins.tensor, divisors(cluster.gpus_per_node)):
        deepest = [p for p in divisors(world) if p <= len(graph.layers)]
        for pipeline in _values(pins.pipeline, tuple(deepest)):
            if world % (tensor * pipeline):
                continue
            data = world // (tensor * pipeline)
            if pins.data not in (None, data) or batch % data:
                continue
            micro_batches = [n for n in divisors(batch // data) if n <= LARGEST_MICRO_BATCH]
            for micro_batch in _values(pins.micro_batch_size, tuple(micro_batches)):
                if batch % (micro_batch * data):
                    continue
                for schedule in _values(pins.schedule, SCHEDULES if pipeline > 1 else SCHEDULES[:1]):
                    for zero_stage in _values(pins.zero_stage, ZERO_STAGES):
                        for checkpointing in _values(pins.activation_checkpointing, CHECKPOINTING):
                            yield _strategy(
                                pins,
                                tensor=tensor,
                                pipeline=pipeline,
                                data=data,
                                zero_stage=zero_stage,
                                micro_batch_size=micro_batch,
                                accumulation=batch // (micro_batch * data),
                                checkpointing=checkpointing,
                                schedule=schedule,
                            )


def nearest(recipe: Recipe, cluster: Cluster) -> Strategy:
    """The pinned layout with plain values for the rest, whether or not it multiplies out: what the rules explain."""
    pins = recipe.parallelism
    tensor, pipeline = pins.tensor or 1, pins.pipeline or 1
    data = pins.data or max(1, cluster.world_size // (tensor * pipeline))
    if pins.tensor is None and cluster.world_size % (pipeline * data) == 0:
        tensor = cluster.world_size // (pipeline * data)
    elif pins.pipeline is None and cluster.world_size % (tensor * data) == 0:
        pipeline = cluster.world_size // (tensor * data)
    micro_batch = pins.micro_batch_size or 1
    return _strategy(
        pins,
        tensor=tensor,
        pipeline=pipeline,
        data=data,
        zero_stage=1 if pins.zero_stage is None else pins.zero_stage,
        micro_batch_size=micro_batch,
        accumulation=max(1, recipe.training.global_batch_size // (micro_batch * data)),
        checkpointing=pins.activation_checkpointing or "none",
        schedule=pins.schedule or "1f1b",
    )


def without_pins(recipe: Recipe, *, zero_stage: int) -> Recipe:
    """The same run as people run it today: no tensor or pipeline parallelism, this ZeRO stage."""
    pins = dataclasses.replace(
        recipe.parallelism,
        tensor=1,
        pipeline=1,
        data=None,
        zero_stage=zero_stage,
        micro_batch_size=None,
        activation_checkpointing=None,
        schedule="1f1b",
    )
    return dataclasses.replace(recipe, parallelism=pins)


def _strategy(
    pins: ParallelismSection,
    *,
    tensor: int,
    pipeline: int,
    data: int,
    zero_stage: int,
    micro_batch_size: int,
    accumulation: int,
    checkpointing: str,
    schedule: str,
) -> Strategy:
    return Strategy(
        tensor=tensor,
        pipeline=pipeline,
        data=data,
        zero_stage=zero_stage,
        micro_batch_size=micro_batch_size,
        gradient_accumulation_steps=accumulation,
        activation_checkpointing=checkpointing,
        schedule=schedule,
        # `auto` never offloads in this version: nothing could run it.
        offload=pins.offload or "none",
        expert=pins.expert,
        context=pins.context,
        virtual_stages=pins.virtual_stages,
        sequence_parallel=pins.sequence_parallel,
    )


def _values(pin: T | None, choices: tuple[T, ...]) -> tuple[T, ...]:
    return choices if pin is None else (pin,)

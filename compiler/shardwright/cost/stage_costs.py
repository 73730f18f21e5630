"""What any run of layers costs as a stage of a layout that is not placed yet: what a placing is
chosen by."""

from __future__ import annotations

import functools
import operator

from shardwright.cost.micro_batch_times import FORWARD_SHARE, PassTimes, pass_times
from shardwright.cost.peak_memory import (
    RankMemoryModel,
    bytes_with_headroom,
    model_state_bytes,
    usable_bytes,
)
from shardwright.cost.priced_layout import ModelChunk, PricedLayout, in_flight
from shardwright.cost.step_time import per_step_seconds_per_parameter
from shardwright.recipe.literal_types import PartialCheckpointing


class StageCosts:
    """Each part is worked out when it is asked for: a layout without a pipeline asks for none.

    forward_seconds, backward_seconds: of one micro-batch, collectives included;
    once_per_step_seconds: once a step. Prefix sums over graph.layers. per_stage_seconds: what a
    stage takes beyond its layers, forward and backward.
    """

    def __init__(self, layout: PricedLayout) -> None:
        self._layout = layout

    @functools.cached_property
    def forward_seconds(self) -> tuple[float, ...]:
        return tuple(map(operator.add, self._passes.forward_compute, self._passes.forward_comm))

    @functools.cached_property
    def backward_seconds(self) -> tuple[float, ...]:
        return tuple(map(operator.add, self._passes.backward_compute, self._passes.backward_comm))

    @functools.cached_property
    def once_per_step_seconds(self) -> tuple[float, ...]:
        each = per_step_seconds_per_parameter(self._layout)
        return tuple([each * numel for numel in self._layout.shapes.numel])

    @property
    def per_stage_seconds(self) -> tuple[float, float]:
        s, seconds = self._layout.strategy, self._passes.per_rank_seconds
        stages_a_rank = s.stages // s.pipeline
        backward = seconds * (1 - FORWARD_SHARE) / stages_a_rank
        return seconds * FORWARD_SHARE / stages_a_rank, backward + self._again_seconds

    @property
    def _again_seconds(self) -> float:
        """What partial checkpointing adds to a stage: as many layers on each, of the mean
        length."""
        choice, found = self._layout.strategy.activation_checkpointing, self._passes
        if not isinstance(choice, PartialCheckpointing):
            return 0.0
        return (
            choice.full
            * (found.partial_recompute_compute[-1] + found.partial_recompute_comm[-1])
            / self._layout.graph.decoder_layers
        )

    @property
    def send_seconds(self) -> float:
        return self._passes.send_seconds

    @functools.cached_property
    def usable_bytes(self) -> int:
        return usable_bytes(self._layout.problem, self._layout.constants)

    @property
    def bytes_with_headroom(self) -> int:
        return bytes_with_headroom(self._layout.cluster.capacity_bytes)

    @property
    def least_bytes(self) -> float:
        """The states alone, spread evenly: no placing's fullest rank holds less."""
        layout = self._layout
        numel = layout.shapes.numel[-1] - layout.shapes.shared_numel
        experts = layout.shapes.expert_numel[-1] if layout.strategy.shards_experts else 0
        return sum(model_state_bytes(layout, numel, experts=experts)) / layout.strategy.pipeline

    def held(self, start: int, stop: int) -> tuple[float, float]:
        numel = self._layout.shapes.numel
        return numel[stop] - numel[start], self._bytes.kept_bytes(start, stop)

    def peak_bytes(self, rank: int, bounds: tuple[int, ...]) -> int:
        """Of a pipeline rank with these layers. bounds: start and stop of each of its stages."""
        blocks = tuple(map(ModelChunk, bounds[::2], bounds[1::2], self._in_flight[rank]))
        return self._bytes.peak_bytes(blocks, self.usable_bytes)

    @functools.cached_property
    def _passes(self) -> PassTimes:
        return pass_times(self._layout)

    @functools.cached_property
    def _bytes(self) -> RankMemoryModel:
        return RankMemoryModel(self._layout)

    @functools.cached_property
    def _in_flight(self) -> list[tuple[float, ...]]:
        return [
            in_flight(self._layout.strategy, rank) for rank in range(self._layout.strategy.pipeline)
        ]

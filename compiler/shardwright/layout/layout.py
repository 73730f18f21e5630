"""Define Layout: the values that a search chooses, one for each axis."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Literal, cast

from shardwright.diagnostics import Diagnostic
from shardwright.layout import axes
from shardwright.layout.axes import Axis, Value, rank_axes, value_text, world_size_of
from shardwright.layout.planning_problem import Problem
from shardwright.layout.schedules import PIPELINE_SCHEDULES, PipelineSchedule
from shardwright.recipe.literal_types import (
    ExpertDispatcher,
    LayerCheckpointing,
    Loss,
    Offload,
    PartialCheckpointing,
    RecomputedModules,
    Schedule,
)
from shardwright.recipe.recipe_types import Recipe
from shardwright.utils.json_values import JsonValue

# The chunks of `model.loss: chunked`; the runtime and the cost model both read them.


MAX_CHUNK_TOKENS = 1024
"""Suffices for a matrix product over the vocabulary to run at its full rate."""
MIN_CHUNKS = 8


def chunk_length(micro_batch_size: int, sequence_length: int) -> int:
    """Return how many positions of each sequence have their logits in memory at a time.

    A chunk has at most MAX_CHUNK_TOKENS tokens and at most an eighth of the sequence.
    """
    return max(1, min(MAX_CHUNK_TOKENS // micro_batch_size, -(-sequence_length // MIN_CHUNKS)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Hold a value for each row of layout/axes.py, in print order.

    hpz_partition_size: ranks of a node that share a second copy of the weights at ZeRO-3; 1 means
        none
    """

    tensor: int
    pipeline: int
    data: int
    zero_stage: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    activation_checkpointing: LayerCheckpointing | PartialCheckpointing
    schedule: Schedule
    offload: Offload
    expert: int = 1
    expert_tensor: int | Literal["tensor"] = "tensor"
    context: int = 1
    virtual_stages: int = 1
    sequence_parallel: bool = False
    expert_dispatcher: ExpertDispatcher = "alltoall"
    expert_overlap: bool = False
    loss: Loss = "full"
    hpz_partition_size: int = 1

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return world_size_of(self.degrees())

    @property
    def zero_world_size(self) -> int:
        """Return the ranks with the same parameters, over which ZeRO shards states and gradients
        are summed.

        Engines call them data-parallel ranks: data x context.
        """
        return self.data * self.context

    @property
    def expert_tensor_ranks(self) -> int:
        """Return the ranks over which each expert's matrices are sharded."""
        return self.tensor if self.expert_tensor == "tensor" else self.expert_tensor

    @property
    def shards_experts(self) -> bool:
        """Return whether experts are sharded otherwise than the rest of the model."""
        return self.expert > 1 or self.expert_tensor_ranks != self.tensor

    @property
    def expert_shard_ratio(self) -> float:
        """Return a rank's experts under tensor parallelism alone, over those that it holds."""
        return self.expert * self.expert_tensor_ranks / self.tensor

    @property
    def expert_replicas(self) -> int:
        """Return how many ranks of a stage hold the same expert shard.

        Returns 1 too for an illegal layout that has fewer ranks than shards.
        """
        return max(
            1, self.zero_world_size * self.tensor // (self.expert * self.expert_tensor_ranks)
        )

    @property
    def overlapped_share(self) -> float:
        """Return the share of the micro-batches whose exchange of experts overlaps with another
        micro-batch.

        Forward passes before a rank's first backward pass have none beside them, nor have backward
        passes after its last forward pass (megatron/core/pipeline_parallel/combined_1f1b.py). Of m
        micro-batches and v chunks a rank makes 2 (p - rank - 1) + (v - 1) p + 1 of its m v passes
        so; over the ranks the mean is p v.
        """
        if not self.expert_overlap:
            return 0.0
        return max(0.0, 1 - self.pipeline / self.gradient_accumulation_steps)

    @property
    def stages(self) -> int:
        """Return the pipeline stages; some schedules place two on each rank."""
        return self.pipeline_schedule.stages_per_rank * self.pipeline

    @property
    def pipeline_schedule(self) -> PipelineSchedule:
        """Return the schedule's row of the table."""
        return PIPELINE_SCHEDULES[self.schedule]

    @property
    def ends_share_rank(self) -> bool:
        """Return whether one pipeline rank holds the embedding and the head."""
        return self.pipeline == 1 or self.pipeline_schedule.is_v_shaped

    @property
    def message_shards(self) -> int:
        """Tensor ranks that each send a share of an activation between stages."""
        return self.tensor if self.pipeline_schedule.shards_messages else 1

    @property
    def total_stages(self) -> int:
        """Return the stages that the layers are split into, virtual stages counted."""
        return self.stages * self.virtual_stages if self.is_interleaved else self.stages

    @property
    def is_interleaved(self) -> bool:
        """Return whether pipeline ranks alternate between several virtual stages, as a legal
        layout does."""
        return self.virtual_stages > 1 and self.pipeline_schedule.interleaves

    @property
    def has_full_model_per_rank(self) -> bool:
        """Return whether each rank computes with the whole model, its ZeRO shards gathered."""
        return not any(axis.is_model_parallel for axis, _ in self.enabled_axes())

    @property
    def checkpointing(self) -> LayerCheckpointing:
        """Return how those layers are checkpointed that are checkpointed at all."""
        choice = self.activation_checkpointing
        return "full" if isinstance(choice, PartialCheckpointing) else choice

    @property
    def recompute_modules(self) -> RecomputedModules:
        """Return the modules of a layer that are recomputed by themselves."""
        mode = self.activation_checkpointing
        return mode if isinstance(mode, tuple) else ()

    @property
    def recomputes_attention(self) -> bool:
        """Return whether a checkpointed layer computes attention over the sequence again."""
        mode = self.checkpointing
        return "core_attn" in mode if isinstance(mode, tuple) else mode != "none"

    @property
    def recomputes_experts(self) -> bool:
        """Return whether a checkpointed layer sends tokens to experts again."""
        mode = self.checkpointing
        return "moe" in mode if isinstance(mode, tuple) else mode == "full"

    def degrees(self) -> dict[str, int]:
        """Return the degrees that multiply to the world size, by axis name."""
        return {axis.name: getattr(self, axis.name) for axis in rank_axes()}

    def values(self) -> Mapping[Axis, Value]:
        """Return each axis's value, in print order."""
        return {axis: getattr(self, axis.name) for axis in axes_in_print_order(type(self))}

    def enabled_axes(self) -> tuple[tuple[Axis, Value], ...]:
        """Return the axes that differ from their off value, with their values."""
        return tuple(
            (axis, value)
            for axis in axes_in_print_order(type(self))
            if (value := getattr(self, axis.name)) != axis.off_value
        )

    def pins(self) -> dict[str, JsonValue]:
        """Return the keys and values of a recipe's `parallelism` that admit this layout only."""
        return {
            axis.name: _json_value(value)
            for axis, value in self.values().items()
            if axis.section == "parallelism"
            and ((axis.values is not None and axis.in_every_engine) or value != axis.off_value)
        }

    def describe(self) -> str:
        """Return `key=value` pairs of the recipe's keys, without those at a default that is off."""
        pins = self.pins()
        return " ".join(
            f"{axis.name}={value_text(value)}"
            for axis, value in self.values().items()
            if axis.name in pins and (axis.is_auto_by_default or value != axis.off_value)
        )

    def letters(self) -> tuple[str, ...]:
        """Return the layout in the field's letters: ("TP 2", "PP 4", "DP 16", "ZeRO-1").

        Axes at their off value are left out, except data ranks and the ZeRO stage.
        """
        return tuple(
            _letters(axis, value)
            for axis, value in ((axis, getattr(self, axis.name)) for axis in axes.AXES)
            if axis.letters and (axis.always_in_letters or value != axis.off_value)
        )


def _json_value(value: Value) -> JsonValue:
    if isinstance(value, PartialCheckpointing):
        return asdict(value)
    return list(value) if isinstance(value, tuple) else value


LETTERS = {"full": "AC", "selective": "SAC", "dualpipev": "DualPipeV"}
"""Names values as papers do: (selective) activation checkpointing, a schedule."""


def _letters(axis: Axis, value: Value) -> str:
    if isinstance(value, PartialCheckpointing):
        return f"AC {value.full}"
    if isinstance(value, tuple):
        return f"SAC {'+'.join(value)}"
    return axis.letters.format(LETTERS.get(str(value), value))


def axes_in_print_order(layout: type[Layout] = Layout) -> tuple[Axis, ...]:
    """Return the table's rows in the order of the fields of Layout."""
    return _axes_of(cast("Hashable", layout))


@functools.cache
def _axes_of(layout: type[Layout]) -> tuple[Axis, ...]:
    rows = {axis.name: axis for axis in axes.AXES}
    return tuple(rows[field.name] for field in fields(layout))


def layout_axes() -> tuple[Axis, ...]:
    """Return the axes that every engine's search chooses where the recipe says auto, in print
    order."""
    return tuple(
        axis for axis in axes_in_print_order() if axis.values is not None and axis.in_every_engine
    )


def searched_axes(recipe: Recipe) -> tuple[Axis, ...]:
    """Return layout_axes() and the further axes that the recipe leaves to the search."""
    return tuple(
        axis
        for axis in axes_in_print_order()
        if axis in layout_axes()
        or (axis.section and axis.values is not None and axis.pin(recipe) is None)
    )


def in_layer_axes(*layouts: Layout) -> tuple[str, ...]:
    """Return the names of the axes whose collectives a layer waits for, in any of these layouts.

    Returns tensor where there are none.
    """
    rows = [axis for axis in axes_in_print_order() if axis.is_in_layer]
    names = [
        axis.name for axis in rows if any(getattr(s, axis.name) != axis.off_value for s in layouts)
    ]
    return tuple(names) or ("tensor",)


def in_layer_collectives_text(*layouts: Layout) -> str:
    """Name these collectives: "tensor-parallel", "tensor- and expert-parallel"."""
    *others, last = in_layer_axes(*layouts)
    return (
        f"{', '.join(f'{name}-' for name in others)} and {last}-parallel"
        if others
        else f"{last}-parallel"
    )


def auto_by_default_axes() -> tuple[Axis, ...]:
    """Return the layout_axes() whose default is auto.

    A search offloads to the host only where the recipe allows it.
    """
    return tuple(axis for axis in layout_axes() if axis.is_auto_by_default)


# Rules about layouts.


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate(Problem):
    """Pair a problem with the layout that a rule checks."""

    strategy: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Check a candidate: return a diagnostic where the layout is not legal.

    check: returns the diagnostic, or None
    reads: names of the axes that decide the result; a search that has chosen these rejects every
        completion at once (the message may name other axes)
    """

    check: Callable[[Candidate], Diagnostic | None]
    reads: frozenset[str]


def rule(check: Callable[[Candidate], Diagnostic | None], *reads: str) -> Rule:
    return Rule(check=check, reads=frozenset(reads))

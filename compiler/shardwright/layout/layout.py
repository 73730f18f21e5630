"""Stage 4's subject: one layout, everything that the search decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Literal

from shardwright.diagnostics import Diagnostic
from shardwright.layout import axes
from shardwright.layout.axes import Axis, Value, rank_axes, world_size_of
from shardwright.layout.planning_problem import Problem
from shardwright.layout.schedules import PIPELINE_SCHEDULES, PipelineSchedule
from shardwright.recipe.literal_types import (
    Checkpointing,
    Loss,
    Offload,
    PartialCheckpointing,
    Schedule,
)
from shardwright.recipe.recipe_types import Recipe
from shardwright.utils.json_values import JsonValue

# How far `model.loss: chunked` cuts a micro-batch: what the runtime runs is what the cost model
# counts.


MAX_CHUNK_TOKENS = 1024
"""Enough rows for a matrix product over the vocabulary to run at its rate."""
MIN_CHUNKS = 8


def chunk_length(micro_batch_size: int, sequence_length: int) -> int:
    """Positions of every row whose logits exist at a time: at most MAX_CHUNK_TOKENS tokens, and at
    most an eighth."""
    return max(1, min(MAX_CHUNK_TOKENS // micro_batch_size, -(-sequence_length // MIN_CHUNKS)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A value for each row of the table (layout/axes.py), in the order in which they are printed.

    hpz_partition_size: ranks of a node that share a second copy of the weights at ZeRO-3; 1 = none.
    """

    tensor: int
    pipeline: int
    data: int
    zero_stage: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    activation_checkpointing: Checkpointing | PartialCheckpointing
    schedule: Schedule
    offload: Offload
    expert: int = 1
    expert_tensor: int | Literal["tensor"] = "tensor"
    context: int = 1
    virtual_stages: int = 1
    sequence_parallel: bool = False
    loss: Loss = "full"
    hpz_partition_size: int = 1

    @property
    def world_size(self) -> int:
        return world_size_of(self.degrees())

    @property
    def shards(self) -> int:
        """Ranks with the same parameters, over which ZeRO shares out states and gradients are
        summed: what an engine calls data ranks."""
        return self.data * self.context

    @property
    def expert_tensor_ranks(self) -> int:
        """That each expert's matrices are cut over."""
        return self.tensor if self.expert_tensor == "tensor" else self.expert_tensor

    @property
    def shards_experts(self) -> bool:
        """Whether ranks hold other parts of experts than of everything else."""
        return self.expert > 1 or self.expert_tensor_ranks != self.tensor

    @property
    def expert_shard_ratio(self) -> float:
        """What a rank would have of experts, were they cut over tensor ranks alone, over what it
        has."""
        return self.expert * self.expert_tensor_ranks / self.tensor

    @property
    def expert_replicas(self) -> int:
        """Ranks of a stage that hold the same part of the experts; 1 too where a layout that no
        rule lets through has fewer ranks than parts."""
        return max(1, self.shards * self.tensor // (self.expert * self.expert_tensor_ranks))

    @property
    def stages(self) -> int:
        """Pipeline stages to cut the layers into: some schedules hold two on each rank."""
        return self.pipeline_schedule.stages_per_rank * self.pipeline

    @property
    def pipeline_schedule(self) -> PipelineSchedule:
        """The schedule's row of the table."""
        return PIPELINE_SCHEDULES[self.schedule]

    @property
    def ends_share_rank(self) -> bool:
        """Whether one pipeline rank holds the embedding and the head."""
        return self.pipeline == 1 or self.pipeline_schedule.is_v_shaped

    @property
    def message_shards(self) -> int:
        """Tensor ranks that each send a share of an activation between stages."""
        return self.tensor if self.pipeline_schedule.shards_messages else 1

    @property
    def parts(self) -> int:
        """What the layers are cut into, virtual stages counted."""
        return self.stages * self.virtual_stages if self.is_interleaved else self.stages

    @property
    def is_interleaved(self) -> bool:
        """Pipeline ranks hold several parts of the model and take them in turns. What a rule
        refuses does not."""
        return self.virtual_stages > 1 and self.pipeline_schedule.interleaves

    @property
    def has_full_model_per_rank(self) -> bool:
        """Whether each rank has the whole model (its ZeRO shards gathered)."""
        return not any(axis.cuts for axis, _ in self.enabled_axes())

    @property
    def checkpointing(self) -> Checkpointing:
        """Of the layers that are checkpointed at all."""
        choice = self.activation_checkpointing
        return "full" if isinstance(choice, PartialCheckpointing) else choice

    def degrees(self) -> dict[str, int]:
        return {axis.name: getattr(self, axis.name) for axis in rank_axes()}

    def values(self) -> Mapping[Axis, Value]:
        """Of every row, in the order in which they are printed."""
        return {axis: getattr(self, axis.name) for axis in axes_in_print_order(type(self))}

    def enabled_axes(self) -> tuple[tuple[Axis, Value], ...]:
        """What the layout has, and its value."""
        return tuple((axis, value) for axis, value in self.values().items() if value != axis.plain)

    def pins(self) -> dict[str, JsonValue]:
        """The keys of a recipe's `parallelism` that leave this layout alone, and their values as a
        recipe has them."""
        return {
            axis.name: asdict(value) if isinstance(value, PartialCheckpointing) else value
            for axis, value in self.values().items()
            if axis.section == "parallelism"
            and ((axis.values is not None and axis.runs) or value != axis.plain)
        }

    def describe(self) -> str:
        """Recipe key names, the keys of `pins`; where a recipe's default is plain, only what is
        not."""
        pins = self.pins()
        return " ".join(
            f"{axis.name}={value}"
            for axis, value in self.values().items()
            if axis.name in pins and (axis.is_auto_by_default or value != axis.plain)
        )


def axes_in_print_order(strategy: type[Layout] = Layout) -> tuple[Axis, ...]:
    rows = {axis.name: axis for axis in axes.AXES}
    return tuple(rows[field.name] for field in fields(strategy))


def layout_axes() -> tuple[Axis, ...]:
    """Those that a search settles under every engine where the recipe says auto, as they are
    printed."""
    return tuple(axis for axis in axes_in_print_order() if axis.values is not None and axis.runs)


def searched_axes(recipe: Recipe) -> tuple[Axis, ...]:
    """layout_axes, and what else the recipe leaves to the search."""
    return tuple(
        axis
        for axis in axes_in_print_order()
        if axis in layout_axes()
        or (axis.section and axis.values is not None and axis.pin(recipe) is None)
    )


def in_layer_axes(*strategies: Layout) -> tuple[str, ...]:
    """Names of those whose collectives a layer of any of these layouts waits for; tensor where
    there are none."""
    rows = [axis for axis in axes_in_print_order() if axis.inside]
    found = [
        axis.name for axis in rows if any(getattr(s, axis.name) != axis.plain for s in strategies)
    ]
    return tuple(found) or ("tensor",)


def in_layer_collectives_text(*strategies: Layout) -> str:
    """Of their collectives: "tensor-parallel", "tensor- and expert-parallel"."""
    *others, last = in_layer_axes(*strategies)
    return (
        f"{', '.join(f'{name}-' for name in others)} and {last}-parallel"
        if others
        else f"{last}-parallel"
    )


def auto_by_default_axes() -> tuple[Axis, ...]:
    """Those of them whose default is auto. A search that was not asked to does not offload states
    to the host."""
    return tuple(axis for axis in layout_axes() if axis.is_auto_by_default)


# A rule about layouts: what it looks at, what it says, and what of the layout it reads.


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate(Problem):
    """What a rule looks at: a strategy for a problem."""

    strategy: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """reads: the strategy's keys that decide whether the layout breaks it (its message may name
    others). A search that has settled these rules out everything below at once."""

    check: Callable[[Candidate], Diagnostic | None]
    reads: frozenset[str]


def rule(check: Callable[[Candidate], Diagnostic | None], *reads: str) -> Rule:
    return Rule(check=check, reads=frozenset(reads))

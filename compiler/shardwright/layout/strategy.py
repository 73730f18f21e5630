"""Stage 4's subject: one layout, everything that the search decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from shardwright.ir.words import Checkpointing, Loss, Offload, Schedule
from shardwright.layout import axes
from shardwright.layout.axes import Axis, Value, axis_of, rank_axes, world_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A value for each row of the table (layout/axes.py), in the order in which they are printed.

    hpz_partition_size: ranks of a node that share a second copy of the weights at ZeRO-3; 1 = none.
    """

    tensor: int
    pipeline: int
    data: int
    zero_stage: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    activation_checkpointing: Checkpointing
    schedule: Schedule
    offload: Offload
    expert: int = 1
    context: int = 1
    virtual_stages: int = 1
    sequence_parallel: bool = False
    loss: Loss = "full"
    hpz_partition_size: int = 1

    @property
    def world_size(self) -> int:
        return world_of(self.degrees())

    @property
    def stages(self) -> int:
        """Pipeline stages to cut the layers into: DualPipeV holds two on each pipeline rank."""
        return 2 * self.pipeline if self.schedule == "dualpipev" else self.pipeline

    @property
    def is_whole(self) -> bool:
        """Whether each rank has the whole model (its ZeRO shards gathered)."""
        return not any(axis.cuts for axis, _ in self.beyond_plain())

    def degrees(self) -> dict[str, int]:
        return {axis.name: getattr(self, axis.name) for axis in rank_axes()}

    def values(self) -> Mapping[Axis, Value]:
        """Of every row, in the order in which they are printed."""
        return {axis: getattr(self, axis.name) for axis in printed_axes(type(self))}

    def beyond_plain(self) -> tuple[tuple[Axis, Value], ...]:
        """What the layout has, and its value."""
        return tuple((axis, value) for axis, value in self.values().items() if value != axis.plain)

    def pins(self) -> dict[str, Value]:
        """The keys of a recipe's `parallelism` that leave this layout alone."""
        return {
            axis.name: value
            for axis, value in self.values().items()
            if axis.section == "parallelism" and (axis.values is not None or value != axis.plain)
        }

    def describe(self) -> str:
        """Recipe key names, the keys of `pins`; where a recipe's default is plain, only what is not."""
        return " ".join(f"{name}={value}" for name, value in self.said().items())

    def said(self) -> dict[str, Value]:
        pins = self.pins()
        return {name: v for name, v in pins.items() if axis_of(name).is_free or v != axis_of(name).plain}


def printed_axes(strategy: type[Strategy] = Strategy) -> tuple[Axis, ...]:
    rows = {axis.name: axis for axis in axes.AXES}
    return tuple(rows[field.name] for field in fields(strategy))


def layout_axes() -> tuple[Axis, ...]:
    """Those that a search settles where the recipe says auto, as they are printed."""
    return tuple(axis for axis in printed_axes() if axis.values is not None)


def free_axes() -> tuple[Axis, ...]:
    """Those of them whose default is auto. A search that was not asked to does not offload states to the host."""
    return tuple(axis for axis in layout_axes() if axis.is_free)

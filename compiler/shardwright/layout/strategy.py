"""Stage 4's subject: one layout, everything that the search decides."""

from __future__ import annotations

from dataclasses import dataclass

UNPRICED_AXES = ("expert", "context")
"""Axes that the cost model does not know: beyond 1 there are no numbers for a layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    tensor: int
    pipeline: int
    data: int
    zero_stage: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    activation_checkpointing: str  # none | selective | full
    schedule: str  # 1f1b | dualpipev
    offload: str  # none | optimizer | parameters
    expert: int = 1
    context: int = 1
    virtual_stages: int = 1
    sequence_parallel: bool = False
    loss: str = "full"  # full | chunked
    hpz_partition_size: int = 1  # ranks of a node that share a second copy of the weights at ZeRO-3; 1 = none

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def stages(self) -> int:
        """Pipeline stages to cut the layers into: DualPipeV holds two on each pipeline rank."""
        return 2 * self.pipeline if self.schedule == "dualpipev" else self.pipeline

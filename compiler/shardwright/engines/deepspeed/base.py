"""What both of DeepSpeed's engines have in common as trainers: what they hold, and how it is restored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.runtime.pipe.topology import PipelineParallelGrid

from shardwright.engines.deepspeed.live import (
    held_parameters,
    live_fragments,
    loss_scale,
    optimizer_step,
    set_loss_scale,
    set_optimizer_step,
    use_masters,
)
from shardwright.engines.protocol import Counters, HeldParameter, LiveFragment
from shardwright.plan.plan import Plan


class DeepSpeedTrainer:
    """engines.protocol.Trainer without its steps. engine: DeepSpeed's; grid: its process groups."""

    plan: Plan
    engine: Any
    grid: PipelineParallelGrid
    device: torch.device
    transposed: frozenset[str]

    def owned(self) -> Iterator[LiveFragment]:
        return live_fragments(self.plan, self.engine)

    def held(self) -> dict[str, HeldParameter]:
        return held_parameters(self.engine.module)

    def counters(self) -> Counters:
        scale = loss_scale(self.engine) if self.plan.training.precision == "fp16" else None
        return Counters(updates=optimizer_step(self.engine), loss_scale=scale)

    def restored(self, step: int, counters: Counters) -> None:
        set_optimizer_step(self.engine, counters.updates)
        use_masters(self.engine)
        if self.plan.training.precision == "fp16":
            set_loss_scale(self.engine, counters.loss_scale or {})
        self.engine.global_steps = step
        self.engine.global_samples = step * self.plan.training.global_batch_size

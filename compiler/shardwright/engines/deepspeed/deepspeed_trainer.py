"""What trainers under both of DeepSpeed's engines share: how one is made, what it holds, how it is
restored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.topology import PipelineParallelGrid
from torch import nn

from shardwright.engines.deepspeed.deepspeed_expert_groups import parameter_groups
from shardwright.engines.deepspeed.deepspeed_optimizer_shards import (
    copy_masters_to_model,
    loss_scale,
    optimizer_shards,
    optimizer_step,
    parameter_shards,
    set_loss_scale,
    set_optimizer_step,
)
from shardwright.engines.trainer_protocol import OptimizerCounters, OwnedShard, ParameterShard
from shardwright.models.router_aux_loss import RouterAuxLoss
from shardwright.parallel.context_batch_shards import contiguous_shard
from shardwright.parallel.distributed_losses import CausalLoss, ChunkedLoss
from shardwright.parallel.micro_batches import MicroBatch
from shardwright.parallel.parameter_names import is_padding
from shardwright.parallel.router_balance_loss import micro_batch_weight
from shardwright.plan.plan import Plan


class DeepSpeedTrainer:
    """engines.protocol.Trainer without its steps. engine: DeepSpeed's; grid: its process groups.
    balance: of the routers, where the plan has a balance loss."""

    engine: Any
    grid: PipelineParallelGrid
    loss_fn: CausalLoss
    balance: RouterAuxLoss | None = None

    def __init__(self, plan: Plan, transposed: frozenset[str]) -> None:
        self.plan, self.transposed = plan, transposed
        self.device = torch.device(get_accelerator().current_device_name())

    def owned(self) -> Iterator[OwnedShard]:
        return optimizer_shards(self.plan, self.engine)

    def held(self) -> dict[str, ParameterShard]:
        return parameter_shards(self.engine.module)

    def counted(self) -> Iterator[nn.Parameter]:
        first = self.grid.get_slice_parallel_rank() == 0
        for p in self.engine.module.parameters():
            if (
                p.requires_grad
                and not is_padding(p)
                and (first or getattr(p, "tensor_model_parallel", False))
            ):
                yield p

    def counters(self) -> OptimizerCounters:
        scale = loss_scale(self.engine) if self.plan.training.precision == "fp16" else None
        return OptimizerCounters(updates=optimizer_step(self.engine), loss_scale=scale)

    def finish_restore(self, step: int, counters: OptimizerCounters) -> None:
        set_optimizer_step(self.engine, counters.updates)
        copy_masters_to_model(self.engine)
        if self.plan.training.precision == "fp16":
            set_loss_scale(self.engine, counters.loss_scale or {})
        self.engine.global_steps = step
        self.engine.global_samples = step * self.plan.training.global_batch_size

    def _initialize(
        self, module: nn.Module, config: dict[str, Any], mpu: PipelineParallelGrid | None
    ) -> None:
        buffers = _buffers(module)
        self.engine, *_ = deepspeed.initialize(
            model=module,
            model_parameters=parameter_groups(self.plan, module),
            config=config,
            mpu=mpu,
            dist_init_required=False,
        )
        # DeepSpeed casts every buffer to the compute dtype; rotary tables would lose positions that
        # way. A model that is partitioned already (ZeRO-3) it does not move to the device.
        for owner, name, buffer in buffers:
            owner._buffers[name] = buffer.to(self.engine.device)

    def _begin_step(self, micro_batches: list[MicroBatch], learning_rate: float) -> None:
        """Packing makes the number of labels that count differ between micro-batches and ranks: the
        loss is a mean over those of the global batch."""
        predicted = self._sum(sum(m.predicted for m in micro_batches))
        self.loss_fn.scale = len(micro_batches) * self.plan.strategy.shards / predicted
        if self.balance is not None:
            self.balance.share = micro_batch_weight(self.plan, len(micro_batches))
        for group in self.engine.optimizer.param_groups:
            group["lr"] = learning_rate

    def context_shard(self, batch: MicroBatch) -> MicroBatch:
        """This rank's share of a micro-batch of its data rank."""
        return contiguous_shard(
            batch, self.plan.ranks[dist.get_rank()].context, self.plan.strategy.context
        )

    def _sum(self, number: int) -> int:
        """Over data ranks. number: the same on the context ranks of each."""
        total = torch.tensor([number], dtype=torch.float64, device=self.device)
        dist.all_reduce(total, group=self.grid.get_data_parallel_group())
        return int(total.item()) // self.plan.strategy.context


def build_causal_loss(plan: Plan, grid: PipelineParallelGrid) -> CausalLoss:
    sizes = plan.tensor_parallel.vocabulary_sizes
    kind = ChunkedLoss if plan.model.loss == "chunked" else CausalLoss
    cut = (
        (grid.get_slice_parallel_group(), sum(sizes[: grid.get_slice_parallel_rank()]))
        if sizes
        else ()
    )
    loss = kind(*cut)
    loss.shifted = plan.strategy.context > 1
    return loss


def _buffers(module: nn.Module) -> list[tuple[nn.Module, str, torch.Tensor]]:
    """Copies, contiguous: a checkpoint has flat views of them."""
    named = (
        (m, name, buffer)
        for m in module.modules()
        for name, buffer in m.named_buffers(recurse=False)
    )
    return [
        (m, name, buffer.clone(memory_format=torch.contiguous_format)) for m, name, buffer in named
    ]

"""A step over pairs of pictures and captions, under DeepSpeed's own engine."""

from __future__ import annotations

import torch
from torch import nn

from shardwright.engines.deepspeed.data_parallel_trainer import DataParallelTrainer
from shardwright.parallel.contrastive_batch_loss import wrap_contrastive_loss
from shardwright.parallel.dummy_images import inputs_on_device
from shardwright.parallel.micro_batches import MicroBatch
from shardwright.parallel.torch_dtypes import DTYPES


class ContrastiveTrainer(DataParallelTrainer):
    """One micro-batch a step: its loss compares the pairs of all data ranks with each other."""

    def _prepare_loss(self, model: nn.Module) -> None:
        super()._prepare_loss(model)
        wrap_contrastive_loss(model, self.plan.model.cut.loss, self.grid.get_data_parallel_group())

    def _begin_step(self, micro_batches: list[MicroBatch], learning_rate: float) -> None:
        """There are no labels to count."""
        for group in self.engine.optimizer.param_groups:
            group["lr"] = learning_rate

    def _loss(self, m: MicroBatch) -> torch.Tensor:
        dtype = DTYPES[self.plan.training.precision]
        inputs = inputs_on_device(m.beside, self.device, dtype) or {}
        return self.engine(input_ids=m.input_ids.to(self.device), **inputs)  # type: ignore[no-any-return]

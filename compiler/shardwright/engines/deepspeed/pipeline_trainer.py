"""A step in a pipeline, under DeepSpeed's PipelineEngine."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn

from shardwright.engines.deepspeed.deepspeed_trainer import DeepSpeedTrainer, build_causal_loss
from shardwright.engines.deepspeed.pipeline_module import build_pipeline
from shardwright.engines.trainer_protocol import StepResult
from shardwright.parallel.distributed_losses import CausalLoss, ChunkedLoss
from shardwright.parallel.expert_parallel import ExpertSharder
from shardwright.parallel.micro_batches import MicroBatch, ValidationBatches
from shardwright.parallel.torch_dtypes import DTYPES
from shardwright.parallel.weight_loader import WeightLoader
from shardwright.plan.plan import Plan


class PipelineTrainer(DeepSpeedTrainer):
    """PipelineModule x tensor-parallel layers x ZeRO-1, 1F1B or DualPipeV."""

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        config: dict[str, Any],
        filler: WeightLoader,
        experts: ExpertSharder,
    ) -> None:
        super().__init__(plan, filler.transposed)
        self.loss_fn = CausalLoss()
        dtype = DTYPES[plan.training.precision]
        module = build_pipeline(
            model, plan, lambda *a: self.loss_fn(*a), self.device, dtype, filler, experts
        )
        self.grid = module.mpu()
        self.loss_fn = build_causal_loss(plan, self.grid)
        if isinstance(self.loss_fn, ChunkedLoss):
            assert module.tail is not None
            self.loss_fn.tail = module.tail
        self._initialize(module, config, None)

    def step(self, micro_batches: list[MicroBatch], learning_rate: float) -> StepResult:
        self._begin_step(micro_batches, learning_rate)
        loss = self.engine.train_batch(data_iter=iter(self._pipeline_inputs(micro_batches)))
        return StepResult(loss=float(loss), grad_norm=float(self.engine.get_global_grad_norm()))

    def evaluate(self, held_out: ValidationBatches) -> tuple[float, int]:
        predicted = self._sum(held_out.predicted)
        self.loss_fn.scale = held_out.at_once * self.plan.strategy.shards / max(1, predicted)
        batches, loss = iter(held_out), 0.0
        for _ in range(0, len(held_out), held_out.at_once):
            wired = self._pipeline_inputs(list(itertools.islice(batches, held_out.at_once)))
            loss += float(
                self.engine.eval_batch(data_iter=iter(wired), num_micro_batches=held_out.at_once)
            )
        self.engine.module.train()
        return loss, predicted

    def _pipeline_inputs(self, whole: list[MicroBatch]) -> list[tuple[Any, torch.Tensor]]:
        """(what the first stage takes, labels) of each."""
        pieces = [self.context_shard(m) for m in whole]
        self.engine.module.begin(pieces)
        if self.plan.model.is_vision_language:
            return list(
                zip(
                    self.engine.module.register_image_batches(pieces),
                    [m.labels for m in pieces],
                    strict=True,
                )
            )
        plain = [
            m.input_ids if m.position_ids is None else (m.input_ids, m.position_ids) for m in pieces
        ]
        return list(zip(plain, [m.labels for m in pieces], strict=True))

"""A step without a pipeline, under DeepSpeed's own engine."""

from __future__ import annotations

import math
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology
from deepspeed.runtime.zero.partition_parameters import Init
from torch import nn

from shardwright.engines.deepspeed.deepspeed_trainer import DeepSpeedTrainer, build_causal_loss
from shardwright.engines.deepspeed.hpz_groups import hpz_group
from shardwright.engines.trainer_protocol import StepResult
from shardwright.parallel.activation_checkpointing import apply_activation_checkpointing
from shardwright.parallel.distributed_losses import (
    ChunkedLoss,
    micro_batch_loss,
    wrap_chunked_loss,
)
from shardwright.parallel.dummy_images import DummyImage
from shardwright.parallel.expert_parallel import ExpertSharder, splits_of_local_experts
from shardwright.parallel.layer_compile import compile_layers
from shardwright.parallel.micro_batches import MicroBatch, ValidationBatches
from shardwright.parallel.tensor_parallel import TensorSplitter
from shardwright.parallel.torch_dtypes import DTYPES
from shardwright.parallel.weight_loader import WeightLoader
from shardwright.plan.plan import Plan


class DataParallelTrainer(DeepSpeedTrainer):
    """The Hugging Face model itself under DeepSpeedEngine: ZeRO 0 to 3, tensor-parallel layers, no
    pipeline."""

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        config: dict[str, Any],
        filler: WeightLoader,
        experts: ExpertSharder,
    ) -> None:
        super().__init__(plan, filler.transposed)
        strategy = plan.strategy
        topology = PipeModelDataParallelTopology(
            num_pp=1, num_mp=strategy.tensor, num_dp=strategy.shards
        )
        self.grid = PipelineParallelGrid(topology=topology)
        self.hpz_group = hpz_group(plan)
        self._shard_and_load(model, config, filler, experts)
        compile_layers(model, plan)
        apply_activation_checkpointing(model, plan)
        self._prepare_loss(model)
        self._initialize(model, config, self.grid)
        self._blank = (
            DummyImage(model)
            if plan.model.is_vision_language and not plan.model.contrastive
            else None
        )

    def _prepare_loss(self, model: nn.Module) -> None:
        self.loss_fn = build_causal_loss(self.plan, self.grid)
        if isinstance(self.loss_fn, ChunkedLoss):
            wrap_chunked_loss(model, self.loss_fn)

    def _shard_and_load(
        self, model: nn.Module, config: dict[str, Any], filler: WeightLoader, experts: ExpertSharder
    ) -> None:
        """A decoder layer at a time, and then the rest. At ZeRO-3 each is partitioned before the
        next is read."""
        plan, stack = self.plan, self.plan.model.cut.stack
        splits = splits_of_local_experts(plan) if plan.strategy.tensor > 1 else ()
        splitter = TensorSplitter(
            model, splits, filler.transposed, self.grid.get_slice_parallel_group()
        )
        layers = [f"{stack}.{name}" for name, _ in model.get_submodule(stack).named_children()]
        for path in (*layers, ""):
            filler.fill(experts.inside(path))
            experts.cut(path)
            for split in splits:
                of_a_layer = split.module.startswith(stack + ".")
                if (split.module + ".").startswith(path + ".") if path else not of_a_layer:
                    # By the module's own names: a parameter that it shares may be listed under
                    # another module's.
                    own = [
                        name
                        for name, _ in model.get_submodule(split.module).named_parameters(
                            recurse=False
                        )
                    ]
                    filler.fill(
                        [f"{split.module}.{name}" if split.module else name for name in own]
                    )
                    splitter.split(split)
            experts.dispatch(path)
            filler.fill([path])
            if plan.strategy.zero_stage == 3:
                self._partition(model.get_submodule(path), config)

    def _partition(self, module: nn.Module, config: dict[str, Any]) -> None:
        """As DeepSpeed's engine does with a whole model (zero/parameter_offload.py,
        _convert_to_zero_parameters)."""
        dtype = DTYPES[self.plan.training.precision]
        for parameter in module.parameters():
            if not hasattr(parameter, "ds_id"):
                parameter.data = parameter.data.to(dtype)
        offload = config["zero_optimization"].get("offload_param") or {}
        Init(
            module=module,
            data_parallel_group=self.grid.get_data_parallel_group(),
            dtype=dtype,
            config_dict_or_path=config,
            remote_device=offload.get("device"),
            pin_memory=bool(offload.get("pin_memory", False)),
            mpu=self.grid,
            zero_param_parallel_group=self.hpz_group,
        )

    def step(self, micro_batches: list[MicroBatch], learning_rate: float) -> StepResult:
        self._begin_step(micro_batches, learning_rate)
        total, norm = torch.zeros((), device=self.device), None
        for m in micro_batches:
            loss = self._loss(m)
            self.engine.backward(loss)
            total += loss.detach()
            if (
                self.plan.strategy.zero_stage == 0
                and self.engine.is_gradient_accumulation_boundary()
            ):
                norm = self._zero0_grad_norm()
            self.engine.step()
        dist.all_reduce(total, group=self.grid.get_data_parallel_group())
        mean = total.item() / (len(micro_batches) * self.plan.strategy.shards)
        return StepResult(
            loss=mean,
            grad_norm=norm if norm is not None else float(self.engine.get_global_grad_norm()),
        )

    @torch.no_grad()
    def evaluate(self, held_out: ValidationBatches) -> tuple[float, int]:
        predicted = self._sum(held_out.predicted)
        self.loss_fn.scale = 1 / max(1, predicted)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        self.engine.eval()
        for m in held_out:
            total += self._loss(m)
        self.engine.train()
        dist.all_reduce(total, group=self.grid.get_data_parallel_group())
        return total.item(), predicted

    def _loss(self, m: MicroBatch) -> torch.Tensor:
        attention, dtype = self.plan.model.attention, DTYPES[self.plan.training.precision]
        return micro_batch_loss(
            self.engine,
            self.loss_fn,
            self.context_shard(m),
            attention,
            self.device,
            dtype,
            self._blank,
        )

    def _zero0_grad_norm(self) -> float:
        """DeepSpeed keeps no norm at ZeRO-0 in fp32, and none at all without clipping."""
        first = self.grid.get_slice_parallel_rank() == 0
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for p in self.engine.module.parameters():
            if p.grad is not None and (first or getattr(p, "tensor_model_parallel", False)):
                total += p.grad.detach().double().square().sum()
        dist.all_reduce(total, group=self.grid.get_slice_parallel_group())
        return math.sqrt(total.item())

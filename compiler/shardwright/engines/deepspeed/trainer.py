"""One training step under DeepSpeed's two engines, behind one interface."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology
from deepspeed.runtime.zero.partition_parameters import Init
from torch import nn

from shardwright.engines.deepspeed.base import DeepSpeedTrainer
from shardwright.engines.deepspeed.fixes import apply_fixes
from shardwright.engines.deepspeed.pipeline import build_pipeline
from shardwright.engines.deepspeed.secondary import secondary_group
from shardwright.engines.protocol import StepResult, Trainer
from shardwright.hf.flash import position_keywords
from shardwright.modules.batches import HeldOut, MicroBatch
from shardwright.modules.dropout import TENSOR_RANDOM
from shardwright.modules.learning_rate import decay_groups
from shardwright.modules.lora import add_adapters
from shardwright.modules.loss import CausalLoss, ChunkedLoss, compute_loss_inside
from shardwright.modules.materialize import Filler
from shardwright.modules.recompute import apply_recompute
from shardwright.modules.tensor.split import TensorSplitter
from shardwright.modules.weights import conv1d_to_linear, open_model
from shardwright.plan.plan import Plan

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def build_trainer(plan: Plan, folder: Path, *, resumes: bool = False) -> Trainer:
    """Builds the model, cuts it as the plan says and hands it to the right engine. Process groups exist already.

    resumes: a checkpoint is loaded next, so that no weights are read or drawn.
    """
    apply_fixes()
    model, weights = open_model(plan, folder, resumes=resumes)
    transposed = conv1d_to_linear(model)
    splits = {p.name: p for module in plan.tensor_parallel.modules for p in module.parameters}
    # Before the adapters, which have their values: it knows the parameters by Hugging Face's names.
    filler = Filler(model, weights, splits, transposed, plan.ranks[dist.get_rank()].tensor)
    add_adapters(model, plan)
    config = json.loads((folder / "ds_config.json").read_text(encoding="utf-8"))
    trainer = (PipelineTrainer if plan.strategy.pipeline > 1 else DataTrainer)(plan, model, config, filler)
    trainer.transposed = transposed
    random_is_cut = plan.model.dropout > 0 and plan.strategy.tensor > 1
    TENSOR_RANDOM.use(trainer.grid.get_slice_parallel_rank() if random_is_cut else None)
    return trainer


def _causal_loss(plan: Plan, grid: PipelineParallelGrid) -> CausalLoss:
    sizes = plan.tensor_parallel.vocabulary_sizes
    kind = ChunkedLoss if plan.model.loss == "chunked" else CausalLoss
    if not sizes:
        return kind()
    return kind(grid.get_slice_parallel_group(), sum(sizes[: grid.get_slice_parallel_rank()]))


def _buffers(module: nn.Module) -> list[tuple[nn.Module, str, torch.Tensor]]:
    """Copies, contiguous: a checkpoint has flat views of them."""
    named = ((m, name, buffer) for m in module.modules() for name, buffer in m.named_buffers(recurse=False))
    return [(m, name, buffer.clone(memory_format=torch.contiguous_format)) for m, name, buffer in named]


def _initialize(plan: Plan, module: nn.Module, config: dict[str, Any], mpu: PipelineParallelGrid | None) -> Any:
    buffers = _buffers(module)
    engine, *_ = deepspeed.initialize(
        model=module,
        model_parameters=decay_groups(module.named_parameters(), plan.optimizer.weight_decay),
        config=config,
        mpu=mpu,
        dist_init_required=False,
    )
    # DeepSpeed casts every buffer to the compute dtype; rotary tables would lose positions that way. A model that is
    # partitioned already (ZeRO-3) it does not move to the device.
    for owner, name, buffer in buffers:
        owner._buffers[name] = buffer.to(engine.device)
    return engine


def _set_rate(engine: Any, learning_rate: float) -> None:
    for group in engine.optimizer.param_groups:
        group["lr"] = learning_rate


def _predicted_tokens(micro_batches: list[MicroBatch], group: dist.ProcessGroup, device: torch.device) -> int:
    """Labels that count in the global batch; packing makes their number differ between micro-batches and ranks."""
    return _sum(sum(m.predicted for m in micro_batches), group, device)


def _sum(number: int, group: dist.ProcessGroup, device: torch.device) -> int:
    total = torch.tensor([number], dtype=torch.float64, device=device)
    dist.all_reduce(total, group=group)
    return int(total.item())


class PipelineTrainer(DeepSpeedTrainer):
    """PipelineModule x tensor-parallel layers x ZeRO-1, 1F1B or DualPipeV."""

    def __init__(self, plan: Plan, model: nn.Module, config: dict[str, Any], filler: Filler) -> None:
        self.plan = plan
        self.device = torch.device(get_accelerator().current_device_name())
        self.loss_fn = CausalLoss()
        dtype = DTYPES[plan.training.precision]
        module = build_pipeline(model, plan, lambda *a: self.loss_fn(*a), self.device, dtype, filler)
        self.grid = module.mpu()
        self.loss_fn = _causal_loss(plan, self.grid)
        if isinstance(self.loss_fn, ChunkedLoss):
            assert module.tail is not None
            self.loss_fn.tail = module.tail
        self.engine = _initialize(plan, module, config, None)

    def step(self, micro_batches: list[MicroBatch], learning_rate: float) -> StepResult:
        predicted = _predicted_tokens(micro_batches, self.grid.get_data_parallel_group(), self.device)
        self.loss_fn.scale = len(micro_batches) * self.plan.strategy.data / predicted
        _set_rate(self.engine, learning_rate)
        loss = self.engine.train_batch(data_iter=iter([self._wire(m) for m in micro_batches]))
        return StepResult(loss=float(loss), grad_norm=float(self.engine.get_global_grad_norm()))

    def evaluate(self, held_out: HeldOut) -> tuple[float, int]:
        predicted = _sum(held_out.predicted, self.grid.get_data_parallel_group(), self.device)
        self.loss_fn.scale = held_out.at_once * self.plan.strategy.data / max(1, predicted)
        wired, loss = map(self._wire, held_out), 0.0
        for _ in range(0, len(held_out), held_out.at_once):
            loss += float(self.engine.eval_batch(data_iter=wired, num_micro_batches=held_out.at_once))
        self.engine.module.train()
        return loss, predicted

    @staticmethod
    def _wire(m: MicroBatch) -> tuple[Any, torch.Tensor]:
        inputs = m.input_ids if m.position_ids is None else (m.input_ids, m.position_ids)
        return inputs, m.labels


class DataTrainer(DeepSpeedTrainer):
    """The Hugging Face model itself under DeepSpeedEngine: ZeRO 0 to 3, tensor-parallel layers, no pipeline."""

    def __init__(self, plan: Plan, model: nn.Module, config: dict[str, Any], filler: Filler) -> None:
        self.plan = plan
        strategy = plan.strategy
        self.device = torch.device(get_accelerator().current_device_name())
        topology = PipeModelDataParallelTopology(num_pp=1, num_mp=strategy.tensor, num_dp=strategy.data)
        self.grid = PipelineParallelGrid(topology=topology)
        self.secondary_group = secondary_group(plan)
        layers = list(model.get_submodule(plan.model.cut.stack).children())
        self._cut_and_fill(model, config, filler)
        apply_recompute(layers, strategy.activation_checkpointing, plan.model.attention_module)
        self.loss_fn = _causal_loss(plan, self.grid)
        if isinstance(self.loss_fn, ChunkedLoss):
            compute_loss_inside(model, self.loss_fn)
        self.engine = _initialize(plan, model, config, self.grid)

    def _cut_and_fill(self, model: nn.Module, config: dict[str, Any], filler: Filler) -> None:
        """A decoder layer at a time, and then the rest. At ZeRO-3 each is partitioned before the next is read."""
        plan, stack = self.plan, self.plan.model.cut.stack
        splits = plan.tensor_parallel.modules if plan.strategy.tensor > 1 else ()
        splitter = TensorSplitter(model, splits, filler.transposed, self.grid.get_slice_parallel_group())
        layers = [f"{stack}.{name}" for name, _ in model.get_submodule(stack).named_children()]
        for path in (*layers, ""):
            for split in splits:
                of_a_layer = split.module.startswith(stack + ".")
                if (split.module + ".").startswith(path + ".") if path else not of_a_layer:
                    # By the module's own names: a parameter that it shares may be listed under another module's.
                    own = [name for name, _ in model.get_submodule(split.module).named_parameters(recurse=False)]
                    filler.fill([f"{split.module}.{name}" if split.module else name for name in own])
                    splitter.split(split)
            filler.fill([path])
            if plan.strategy.zero_stage == 3:
                self._partition(model.get_submodule(path), config)

    def _partition(self, module: nn.Module, config: dict[str, Any]) -> None:
        """As DeepSpeed's engine does with a whole model (zero/parameter_offload.py, _convert_to_zero_parameters)."""
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
            zero_param_parallel_group=self.secondary_group,
        )

    def step(self, micro_batches: list[MicroBatch], learning_rate: float) -> StepResult:
        predicted = _predicted_tokens(micro_batches, self.grid.get_data_parallel_group(), self.device)
        self.loss_fn.scale = len(micro_batches) * self.plan.strategy.data / predicted
        _set_rate(self.engine, learning_rate)
        total, norm = torch.zeros((), device=self.device), None
        for m in micro_batches:
            loss = self._loss(m)
            self.engine.backward(loss)
            total += loss.detach()
            if self.plan.strategy.zero_stage == 0 and self.engine.is_gradient_accumulation_boundary():
                norm = self._zero0_grad_norm()
            self.engine.step()
        dist.all_reduce(total, group=self.grid.get_data_parallel_group())
        mean = total.item() / (len(micro_batches) * self.plan.strategy.data)
        return StepResult(loss=mean, grad_norm=norm if norm is not None else float(self.engine.get_global_grad_norm()))

    @torch.no_grad()
    def evaluate(self, held_out: HeldOut) -> tuple[float, int]:
        group = self.grid.get_data_parallel_group()
        predicted = _sum(held_out.predicted, group, self.device)
        self.loss_fn.scale = 1 / max(1, predicted)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        self.engine.eval()
        for m in held_out:
            total += self._loss(m)
        self.engine.train()
        dist.all_reduce(total, group=group)
        return total.item(), predicted

    def _loss(self, m: MicroBatch) -> torch.Tensor:
        inputs = {"input_ids": m.input_ids.to(self.device), "use_cache": False}
        if m.position_ids is not None:
            inputs |= position_keywords(self.plan.model.attention, m.position_ids.to(self.device))
        labels = m.labels.to(self.device)
        if isinstance(self.loss_fn, ChunkedLoss):
            return self.engine(labels=labels, **inputs)
        return self.loss_fn(self.engine(**inputs).logits, labels)

    def _zero0_grad_norm(self) -> float:
        """DeepSpeed keeps no norm at ZeRO-0 in fp32, and none at all without clipping."""
        first = self.grid.get_slice_parallel_rank() == 0
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for p in self.engine.module.parameters():
            if p.grad is not None and (first or getattr(p, "tensor_model_parallel", False)):
                total += p.grad.detach().double().square().sum()
        dist.all_reduce(total, group=self.grid.get_slice_parallel_group())
        return math.sqrt(total.item())

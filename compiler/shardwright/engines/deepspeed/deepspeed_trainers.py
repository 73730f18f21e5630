"""Train under DeepSpeed's engines: how a trainer is built, steps, and is restored."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology
from deepspeed.runtime.zero.partition_parameters import Init
from torch import nn

from shardwright.engines.deepspeed.deepspeed_groups import (
    build_expert_sharder,
    hpz_group,
    own_group,
    parameter_groups,
)
from shardwright.engines.deepspeed.deepspeed_optimizer_shards import (
    bind_optimizer,
    copy_masters_to_model,
    loss_scale,
    optimizer_shards,
    optimizer_step,
    parameter_shards,
    set_loss_scale,
    set_optimizer_step,
)
from shardwright.engines.deepspeed.deepspeed_patches import patch_deepspeed
from shardwright.engines.deepspeed.own_optimizers import own_optimizer
from shardwright.engines.deepspeed.pipeline_module import build_pipeline
from shardwright.engines.engine_table import engine_of
from shardwright.engines.fp32_masters import fill_fp32_masters
from shardwright.engines.trainer_protocol import (
    OptimizerCounters,
    OwnedShard,
    ParameterShard,
    StepResult,
    Trainer,
)
from shardwright.layout.formats import FORMATS
from shardwright.models.mixture_of_experts import RouterAuxLoss
from shardwright.parallel.context_parallel import CONTEXT_PARALLEL, contiguous_shard
from shardwright.parallel.distributed_losses import (
    CausalLoss,
    ChunkedLoss,
    causal_loss_class,
    micro_batch_loss,
    objective_loss,
    wrap_chunked_loss,
    wrap_contrastive_loss,
)
from shardwright.parallel.dummy_images import DummyImage, inputs_on_device
from shardwright.parallel.expert_parallel import (
    ExpertSharder,
    local_expert_range,
    micro_batch_weight,
    router_balance,
    splits_of_local_experts,
)
from shardwright.parallel.layer_compile_and_recompute import (
    apply_activation_checkpointing,
    compile_layers,
)
from shardwright.parallel.lora_adapters import add_adapters
from shardwright.parallel.low_precision_linears import convert_linears
from shardwright.parallel.micro_batches import MicroBatch, ValidationBatches
from shardwright.parallel.model_loading import (
    DTYPES,
    conv1d_to_linear,
    open_model,
    scalars_to_vectors,
)
from shardwright.parallel.parameter_names import is_padding
from shardwright.parallel.tensor_parallel import TensorSplitter
from shardwright.parallel.tensor_parallel_collectives import TENSOR_PARALLEL_RNG
from shardwright.parallel.token_scores import token_scores, trained_sequences
from shardwright.parallel.weight_loader import ShardReader, WeightLoader
from shardwright.plan.plan import Plan

Batches = TypeVar("Batches", bound=Iterable[MicroBatch])


class DeepSpeedTrainer:
    """Implement trainer_protocol.Trainer without its steps.

    engine: DeepSpeed's
    grid: its process groups
    balance: the routers' auxiliary loss, where the plan has one
    """

    engine: Any
    grid: PipelineParallelGrid
    loss_fn: CausalLoss
    balance: RouterAuxLoss | None = None

    def __init__(
        self, plan: Plan, transposed: frozenset[str], *, forward_only: bool = False
    ) -> None:
        self.plan, self.transposed, self._forward_only = plan, transposed, forward_only
        self.device = torch.device(get_accelerator().current_device_name())

    def owned_shards(self) -> Iterator[OwnedShard]:
        return optimizer_shards(self.plan, self.engine)

    def parameter_shards(self) -> dict[str, ParameterShard]:
        return parameter_shards(self.engine.module)

    def objective_metrics(self) -> dict[str, float]:
        objective = self.loss_fn.objective
        at = self.plan.ranks[dist.get_rank()]
        return {} if objective is None else objective.metrics(is_counted=at.tensor == 0)

    def _trained(self, batches: Batches) -> Batches:
        """Return the sequences of a step, or of an evaluation, that the loss is of."""
        if not self.plan.training.objective.traits.reads_labels:
            return batches
        at = self.plan.ranks[dist.get_rank()]
        return cast(
            Batches,
            trained_sequences(
                self.loss_fn,
                cast(Any, self)._forward,
                list(batches),
                is_counted=at.tensor == 0,
                is_first_shard=at.context == 0,
            ),
        )

    def token_scores(self, rows: ValidationBatches, top: int = 0) -> torch.Tensor:
        at, s = self.plan.ranks[dist.get_rank()], self.plan.strategy
        length = self.plan.training.sequence_length
        return token_scores(
            self.loss_fn,
            cast(Any, self)._forward,
            rows,
            length=length,
            first_token=at.context * (length // s.context),
            is_counted=at.tensor == 0,
            device=self.device,
            top=top,
        )

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
        scale = (
            loss_scale(self.engine) if FORMATS[self.plan.training.precision].scales_loss else None
        )
        return OptimizerCounters(updates=optimizer_step(self.engine), loss_scale=scale)

    def finish_restore(self, step: int, counters: OptimizerCounters) -> None:
        set_optimizer_step(self.engine, counters.updates)
        copy_masters_to_model(self.engine)
        if FORMATS[self.plan.training.precision].scales_loss:
            set_loss_scale(self.engine, counters.loss_scale or {})
        self.engine.global_steps = step
        self.engine.global_samples = step * self.plan.training.global_batch_size

    def _initialize(
        self, module: nn.Module, config: dict[str, Any], mpu: PipelineParallelGrid | None
    ) -> None:
        buffers = _buffers(module)
        forward_only = self._forward_only
        if forward_only and self.plan.strategy.zero_stage < 3:
            for parameter in module.parameters():
                parameter.data = parameter.data.to(DTYPES[self.plan.training.precision])
        self.engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=None if forward_only else own_optimizer(self.plan),
            model_parameters=None if forward_only else parameter_groups(self.plan, module),
            config=config,
            mpu=mpu,
            dist_init_required=False,
        )
        # DeepSpeed casts every buffer to the compute dtype, in which rotary tables would lose
        # positions. It does not move a model that is partitioned already (ZeRO-3) to the device.
        for owner, name, buffer in buffers:
            owner._buffers[name] = buffer.to(self.engine.device)
        if not forward_only:
            bind_optimizer(self.plan, self.engine, self.transposed)

    def _begin_step(self, micro_batches: list[MicroBatch], learning_rate: float) -> None:
        """Set the loss scale and the learning rate of a step.

        The loss is a mean over the labels of the global batch, whose number differs between
        micro-batches and ranks under packing.
        """
        predicted = self._sum(sum(m.predicted for m in micro_batches))
        self.loss_fn.scale = len(micro_batches) * self.plan.strategy.zero_world_size / predicted
        if self.balance is not None:
            self.balance.share = micro_batch_weight(self.plan, len(micro_batches))
        self._set_learning_rate(learning_rate)

    def _set_learning_rate(self, learning_rate: float) -> None:
        """Set the rate of an update; under Muon, AdamW's groups have a share of it."""
        for group in self.engine.optimizer.param_groups:
            group["lr"] = learning_rate * group.get("lr_scale", 1.0)

    def context_shard(self, batch: MicroBatch) -> MicroBatch:
        """Return this rank's share of its data rank's micro-batch."""
        return contiguous_shard(
            batch, self.plan.ranks[dist.get_rank()].context, self.plan.strategy.context
        )

    def _sum(self, number: int) -> int:
        """Sum a number over data ranks.

        number: the same on the context ranks of a data rank
        """
        total = torch.tensor([number], dtype=torch.float64, device=self.device)
        dist.all_reduce(total, group=self.grid.get_data_parallel_group())
        return int(total.item()) // self.plan.strategy.context


def build_causal_loss(plan: Plan, grid: PipelineParallelGrid) -> CausalLoss:
    sizes = plan.tensor_parallel.vocabulary_sizes
    kind = causal_loss_class(plan)
    cut = (
        (grid.get_slice_parallel_group(), sum(sizes[: grid.get_slice_parallel_rank()]))
        if sizes
        else ()
    )
    loss = kind(*cut)
    loss.shifted = plan.strategy.context > 1
    return loss


def _buffers(module: nn.Module) -> list[tuple[nn.Module, str, torch.Tensor]]:
    """Return (module, name, contiguous copy) of each buffer; checkpoints need flat views."""
    named = (
        (m, name, buffer)
        for m in module.modules()
        for name, buffer in m.named_buffers(recurse=False)
    )
    return [
        (m, name, buffer.clone(memory_format=torch.contiguous_format)) for m, name, buffer in named
    ]


# A step without a pipeline, under DeepSpeed's own engine.


class DataParallelTrainer(DeepSpeedTrainer):
    """Train the model itself under DeepSpeedEngine, with ZeRO 0 to 3 and tensor parallelism."""

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        config: dict[str, Any],
        filler: WeightLoader,
        experts: ExpertSharder,
        *,
        forward_only: bool = False,
    ) -> None:
        super().__init__(plan, filler.transposed, forward_only=forward_only)
        strategy = plan.strategy
        topology = PipeModelDataParallelTopology(
            num_pp=1, num_mp=strategy.tensor, num_dp=strategy.zero_world_size
        )
        self.grid = PipelineParallelGrid(topology=topology)
        self.hpz_group = hpz_group(plan)
        self._shard_and_load(model, config, filler, experts)
        compile_layers(model, plan)
        apply_activation_checkpointing(model, plan)
        self._prepare_loss(model)
        self._initialize(model, config, self.grid)
        self._blank = DummyImage(model) if plan.model.task_traits.images_in_text else None

    def _prepare_loss(self, model: nn.Module) -> None:
        self.loss_fn = build_causal_loss(self.plan, self.grid)
        if isinstance(self.loss_fn, ChunkedLoss):
            wrap_chunked_loss(model, self.loss_fn)

    def _shard_and_load(
        self, model: nn.Module, config: dict[str, Any], filler: WeightLoader, experts: ExpertSharder
    ) -> None:
        """Shard and load a decoder layer at a time, then the rest.

        At ZeRO-3 each is partitioned before the next is read.
        """
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
                    # By the module's own names: a shared parameter may be listed under another
                    # module's.
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
        """Partition a module as DeepSpeed does with a whole model (zero/parameter_offload.py,
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
        micro_batches = self._trained(micro_batches)
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
        mean = total.item() / (len(micro_batches) * self.plan.strategy.zero_world_size)
        return StepResult(
            loss=mean,
            grad_norm=norm if norm is not None else float(self.engine.get_global_grad_norm()),
        )

    def evaluate(self, held_out: ValidationBatches) -> tuple[float, int]:
        predicted = self._sum(held_out.predicted)
        self.loss_fn.scale = 1 / max(1, predicted)
        total = self._forward(self._trained(held_out))
        dist.all_reduce(total, group=self.grid.get_data_parallel_group())
        return total.item(), predicted

    @torch.no_grad()
    def _forward(self, batches: Iterable[MicroBatch]) -> torch.Tensor:
        """Return this rank's sum of the losses."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        self.engine.eval()
        for m in batches:
            total += self._loss(m)
        self.engine.train()
        return total

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
        """Return the gradient norm that DeepSpeed lacks at ZeRO-0 in fp32 or without clipping."""
        first = self.grid.get_slice_parallel_rank() == 0
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for p in self.engine.module.parameters():
            if p.grad is not None and (first or getattr(p, "tensor_model_parallel", False)):
                total += p.grad.detach().double().square().sum()
        dist.all_reduce(total, group=self.grid.get_slice_parallel_group())
        return math.sqrt(total.item())


# A step over pairs of images and captions, under DeepSpeed's own engine.


class ContrastiveTrainer(DataParallelTrainer):
    """Train on one micro-batch a step, whose loss compares the pairs of all data ranks."""

    def _prepare_loss(self, model: nn.Module) -> None:
        super()._prepare_loss(model)
        wrap_contrastive_loss(model, self.plan.model.cut.loss, self.grid.get_data_parallel_group())

    def _begin_step(self, micro_batches: list[MicroBatch], learning_rate: float) -> None:
        """Set the learning rate; there are no labels to count."""
        self._set_learning_rate(learning_rate)

    def _loss(self, m: MicroBatch) -> torch.Tensor:
        dtype = DTYPES[self.plan.training.precision]
        inputs = inputs_on_device(m.beside, self.device, dtype) or {}
        return self.engine(input_ids=m.input_ids.to(self.device), **inputs)  # type: ignore[no-any-return]


# A step in a pipeline, under DeepSpeed's PipelineEngine.


class PipelineTrainer(DeepSpeedTrainer):
    """Train a PipelineModule with tensor-parallel layers and ZeRO-1, by 1F1B or DualPipeV."""

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        config: dict[str, Any],
        filler: WeightLoader,
        experts: ExpertSharder,
        *,
        forward_only: bool = False,
    ) -> None:
        super().__init__(plan, filler.transposed, forward_only=forward_only)
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
        micro_batches = self._trained(micro_batches)
        self._begin_step(micro_batches, learning_rate)
        loss = self.engine.train_batch(data_iter=iter(self._pipeline_inputs(micro_batches)))
        return StepResult(loss=float(loss), grad_norm=float(self.engine.get_global_grad_norm()))

    def evaluate(self, held_out: ValidationBatches) -> tuple[float, int]:
        predicted = self._sum(held_out.predicted)
        self.loss_fn.scale = (
            held_out.at_once * self.plan.strategy.zero_world_size / max(1, predicted)
        )
        return self._forward(self._trained(held_out), held_out.at_once), predicted

    def _forward(self, batches: Iterable[MicroBatch], at_once: int | None = None) -> float:
        """Return the sum of the losses.

        at_once: micro-batches that pass through the pipeline together; None is as in a step
        """
        at_once = at_once or self.plan.strategy.gradient_accumulation_steps
        loss, rest = 0.0, iter(batches)
        while group := list(itertools.islice(rest, at_once)):
            wired = iter(self._pipeline_inputs(group))
            loss += float(self.engine.eval_batch(data_iter=wired, num_micro_batches=len(group)))
        self.engine.module.train()
        return loss

    def _pipeline_inputs(self, whole: list[MicroBatch]) -> list[tuple[Any, Any]]:
        """Return (input of the first stage, what the loss takes) of each micro-batch."""
        pieces = [self.context_shard(m) for m in whole]
        self.engine.module.begin(pieces)
        if self.plan.model.task_traits.has_images:
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
        return list(zip(plain, [m.labels_and_scores() for m in pieces], strict=True))


# A rank's part of the model, built, and under the DeepSpeed engine that trains it.


def build_trainer(
    plan: Plan, folder: Path, *, resumes: bool = False, forward_only: bool = False
) -> Trainer:
    """Build the model, shard it by the plan and give it to the plan's DeepSpeed engine.

    The process groups exist already.

    resumes: a checkpoint is loaded next, so no weights are read or initialized
    forward_only: it never steps, so no optimizer is built
    """
    patch_deepspeed()
    model, weights = open_model(plan, folder, resumes=resumes)
    transposed = conv1d_to_linear(model)
    scalars_to_vectors(model)
    splits = {p.name: p for module in plan.tensor_parallel.modules for p in module.parameters}
    at = plan.ranks[dist.get_rank()]
    # Built before the adapters are added: it knows the parameters by Hugging Face's names.
    filler = WeightLoader(
        model,
        weights,
        splits,
        transposed,
        at.tensor,
        lambda n, count: local_expert_range(plan, at, n, count),
    )
    add_adapters(model, plan, transposed)
    convert_linears(model, plan, engine_of(plan).low_precision)
    experts = build_expert_sharder(plan, model)
    context: dist.ProcessGroup | None = None
    if plan.strategy.context > 1:
        members: dict[tuple[int, ...], list[int]] = {}
        for r in plan.ranks:
            members.setdefault((r.pipeline, r.data, r.tensor), []).append(r.rank)
        context, _ = own_group(members.values())
    balance = router_balance(plan, model, context)
    config = json.loads((folder / "ds_config.json").read_text(encoding="utf-8"))
    if forward_only:
        config = _forward_only_config(config)
    kind = ContrastiveTrainer if plan.model.task_traits.compares_pairs else DataParallelTrainer
    trainer = (PipelineTrainer if plan.strategy.pipeline > 1 else kind)(
        plan, model, config, filler, experts, forward_only=forward_only
    )
    random_is_cut = plan.model.dropout > 0 and plan.strategy.tensor > 1
    trainer.balance = balance
    trainer.loss_fn.objective = objective_loss(plan.training.objective, trainer.device, context)
    CONTEXT_PARALLEL.use(context, model)
    if not resumes and not forward_only:
        fill_fp32_masters(trainer.owned_shards(), ShardReader(plan, weights, transposed))
    TENSOR_PARALLEL_RNG.use(trainer.grid.get_slice_parallel_rank() if random_is_cut else None)
    return trainer


def _forward_only_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of an engine without an optimizer.

    DeepSpeed's ZeRO 1 and 2 are optimizers alone, and so is what casts a model to bf16 or fp16 at
    stage 0 (engine.py, _configure_bf16_optimizer): _initialize casts it.
    """
    left = {k: v for k, v in config.items() if k not in ("optimizer", "scheduler")}
    zero = dict(left.get("zero_optimization") or {})
    zero.pop("offload_optimizer", None)
    if zero.get("stage", 0) == 3:
        return {**left, "zero_optimization": zero}
    own = ("bf16", "fp16", "zero_optimization", "data_types")
    return {k: v for k, v in left.items() if k not in own}

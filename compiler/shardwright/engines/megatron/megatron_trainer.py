"""Train a rank's part of the model under Megatron-Core: its GPTModel, schedules and optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from megatron.core.optimizer.optimizer_config import ParamKey
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from torch import distributed as dist
from torch import nn

from shardwright.diagnostics import refusal
from shardwright.engines.fp32_masters import fill_fp32_masters
from shardwright.engines.megatron.expert_exchange import check_deepep
from shardwright.engines.megatron.host_optimizer import (
    build_optimizer,
    copy_host_masters,
    host_master,
    torch_optimizers,
)
from shardwright.engines.megatron.low_precision_recipes import low_precision_settings
from shardwright.engines.megatron.megatron_arguments import (
    offload_settings,
    parallel_settings,
    shards_states,
)
from shardwright.engines.megatron.megatron_layers import rank_positions, zigzag_shard
from shardwright.engines.megatron.megatron_model import (
    ParameterRange,
    build_model_chunks,
    freeze_padding_row,
    load_parameter_ranges,
    low_precision_parameters,
    parameter_ranges,
    rotary_frequencies,
    transformer_config,
    zero_padding,
)
from shardwright.engines.megatron.megatron_muon import (
    check_muon,
    learning_rate_share,
    mark_masters,
    mark_matrices,
    moment_names,
    muon_settings,
)
from shardwright.engines.megatron.transformer_engine_layers import (
    check_low_precision,
    layers_log_line,
    uses_transformer_engine,
)
from shardwright.engines.trainer_protocol import (
    OptimizerCounters,
    OwnedShard,
    ParameterShard,
    StepResult,
)
from shardwright.parallel.distributed_losses import CausalLoss
from shardwright.parallel.micro_batches import MicroBatch, ValidationBatches
from shardwright.parallel.model_loading import conv1d_to_linear, load_config, open_model
from shardwright.parallel.weight_loader import ShardReader
from shardwright.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterStates:
    """Hold this rank's share of one flattened parameter's optimizer states.

    start: first element that this rank updates
    states: 1-D views by the names of layout/optimizers.py
    partitioned: other data ranks update other elements
    """

    start: int
    states: dict[str, torch.Tensor]
    partitioned: bool

    @property
    def numel(self) -> int:
        return self.states["fp32"].numel()


def _steps_per_group(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether parameter groups count the updates.

    Where Transformer Engine or Apex is installed, Megatron uses their FusedAdam
    (megatron/core/optimizer/__init__.py), whose groups count from the first update on.
    """
    return not isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW))


class MegatronOptimizerStates:
    """View the states of Megatron's optimizers: one, or a second one for experts."""

    def __init__(self, optimizer: Any) -> None:
        self.parts: list[Any] = list(getattr(optimizer, "chained_optimizers", [optimizer]))
        self.optimizers = [each for part in self.parts for each in torch_optimizers(part.optimizer)]
        self._optimizer_of = {
            master: each
            for each in self.optimizers
            for group in each.param_groups
            for master in group["params"]
        }

    def of(self, parameter: nn.Parameter) -> ParameterStates | None:
        """Return a parameter's states; None where other data ranks update all of it."""
        for part in self.parts:
            if isinstance(part, DistributedOptimizer):
                if parameter in part.model_param_group_index_map:
                    group, place = part.model_param_group_index_map[parameter]
                    master = part.optimizer.param_groups[group]["params"][place]
                    start = part._get_model_param_range_map(parameter)["param"].start
                    return self._master(host_master(part.optimizer, master), start, True)
            elif isinstance(part, Float16OptimizerWithFloat16Params):
                if any(parameter is p for group in part.float16_groups for p in group):
                    half: Any = parameter
                    return self._master(half.main_param, 0, False)
            elif any(parameter is p for group in part.param_groups for p in group["params"]):
                return self._master(parameter, 0, False)
        return None

    def _master(self, master: torch.Tensor, start: int, partitioned: bool) -> ParameterStates:
        state = self._state(master)
        moments = moment_names(self._optimizer_of[master])
        flats = {"fp32": master.detach(), **{moment: state[moment] for moment in moments}}
        states = {name: values.view(-1) for name, values in flats.items()}
        return ParameterStates(start=start, states=states, partitioned=partitioned)

    def _state(self, master: torch.Tensor) -> dict[str, Any]:
        """Return the optimizer's state, created here where the first update has not made it
        yet."""
        optimizer = self._optimizer_of[master]
        state: dict[str, Any] = optimizer.state[master]
        if not state and not _steps_per_group(optimizer):
            state["step"] = torch.tensor(0.0)
        for moment in moment_names(optimizer):
            if moment not in state:
                state[moment] = torch.zeros_like(master, requires_grad=False)
        return state

    def groups(self) -> list[tuple[Any, dict[str, Any]]]:
        """Return each parameter group with its optimizer."""
        return [(part.optimizer, group) for part in self.parts for group in part.param_groups]

    @property
    def updates(self) -> int:
        """Return the number of updates so far."""
        counts = [0]
        for optimizer in self.optimizers:
            if _steps_per_group(optimizer):
                counts += [int(group.get("step", 0)) for group in optimizer.param_groups]
            else:
                counts += [int(self._state(p)["step"]) for p in _masters(optimizer)]
        return max(counts)

    @updates.setter
    def updates(self, count: int) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                if _steps_per_group(optimizer):
                    group["step"] = count
            for master in _masters(optimizer):
                state = self._state(master)
                if isinstance(state.get("step"), torch.Tensor):
                    state["step"].fill_(count)

    def copy_masters_to_model(self, chunks: list[Any]) -> None:
        """Copy the restored masters to the weights that the model computes with. Collective."""
        for part in self.parts:
            copy_host_masters(part.optimizer)
            if hasattr(part, "_copy_main_params_to_model_params"):
                part._copy_main_params_to_model_params()
        if any(isinstance(part, DistributedOptimizer) for part in self.parts):
            for chunk in chunks:
                chunk.start_param_sync(force_sync=True)


def _masters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


_NO_WEIGHT_DECAY = "shardwright_undecayed"
"""Names an attribute of parameters that have no weight decay."""


def build_trainer(plan: Plan, folder: Path, *, resumes: bool = False) -> MegatronTrainer:
    """Build the trainer. Collective.

    resumes: a checkpoint is loaded next, so no weights are read or initialized
    """
    config = load_config(plan, folder)
    model, weights = open_model(plan, folder, resumes=resumes)
    check_deepep(plan)
    rotary, transposed = rotary_frequencies(model), conv1d_to_linear(model)
    mine = plan.ranks[dist.get_rank()]
    fused = uses_transformer_engine(plan)
    check_low_precision(plan, taken=fused)
    check_muon(plan)
    settings = transformer_settings(plan, config)
    if not plan.is_cpu and mine.rank == 0:
        print(layers_log_line(plan, taken=fused), flush=True)
    chunks = build_model_chunks(
        config,
        settings,
        rotary,
        length=plan.training.sequence_length,
        pipeline_rank=mine.pipeline,
        transformer_engine=fused,
    )
    embedding = getattr(model, "get_input_embeddings")()  # noqa: B009
    for chunk in chunks:
        freeze_padding_row(chunk, embedding)
    tied = {alias: group[0] for group in plan.model.tied for alias in group}
    found = [
        p
        for chunk in chunks
        for p in parameter_ranges(config, chunk, tensor_rank=mine.tensor, tied=tied)
    ]
    zero_padding(found)
    shards = ShardReader(plan, weights, transposed)
    if not resumes:
        load_parameter_ranges(found, shards.read)
    trainer = MegatronTrainer(plan, settings, chunks, found, shards)
    if not resumes:
        fill_fp32_masters(trainer.owned_shards(), shards)
    return trainer


def transformer_settings(plan: Plan, config: Any) -> Any:
    """Return TransformerConfig. Raises SW6015 where Megatron-Core does not take the low precision,
    such as with the installed version of Transformer Engine."""
    low_precision = low_precision_settings(plan)
    try:
        return transformer_config(config, **parallel_settings(plan), **low_precision)
    except ValueError as error:
        if plan.low_precision is None:
            raise
        raise refusal(
            "SW6015",
            f"Megatron-Core refuses training.low_precision {plan.low_precision.format}: "
            f"{' '.join(str(error).split())}",
            "Install what Megatron-Core asks for on every host, or write "
            "`training.low_precision: none` and compile again.",
        ) from None


class MegatronTrainer:
    """Implement trainer_protocol.Trainer.

    engine: Megatron's model chunks, each in its DistributedDataParallel
    """

    def __init__(
        self,
        plan: Plan,
        settings: Any,
        chunks: list[Any],
        found: list[ParameterRange],
        shards: ShardReader,
    ) -> None:
        self.plan, self.settings = plan, settings
        self.shards, self.transposed = shards, shards.transposed
        self.mine, self.found = plan.ranks[dist.get_rank()], found
        self.device = torch.device(plan.device.torch_type)
        for piece in found:
            # By the shape in Hugging Face's model: an expert's bias is a row of a matrix there.
            if not piece.is_buffer and len(shards.splits[piece.name].shape) < 2:
                setattr(piece.parameter, _NO_WEIGHT_DECAY, True)
        self.low_precision = low_precision_parameters(settings, chunks)
        self.engine = [
            self._wrap_in_ddp(chunk.to(self.device), place) for place, chunk in enumerate(chunks)
        ]
        settings.finalize_model_grads_func = _finalize
        optimizer, training = plan.optimizer, plan.training
        mark_matrices(plan, self.engine, ((p.name, p.parameter) for p in found if not p.is_buffer))
        self.optimizer = build_optimizer(
            OptimizerConfig(
                lr=optimizer.lr,
                weight_decay=optimizer.weight_decay,
                adam_beta1=optimizer.betas[0],
                adam_beta2=optimizer.betas[1],
                adam_eps=optimizer.eps,
                # Without clipping Megatron computes no norm.
                clip_grad=training.gradient_clipping or float("inf"),
                bf16=settings.bf16,
                params_dtype=settings.params_dtype,
                use_distributed_optimizer=shards_states(plan),
                **({"optimizer": "adam"} | muon_settings(plan)),
                **offload_settings(plan),
            ),
            self.engine,
            config_overrides={ParamKey(attr=_NO_WEIGHT_DECAY): {"wd_mult": 0.0}},
        )
        self.states = MegatronOptimizerStates(self.optimizer)
        mark_masters(self.states.parts)
        self.forward_backward = get_forward_backward_func()
        sizes = plan.tensor_parallel.vocabulary_sizes
        tensor_group = parallel_state.get_tensor_model_parallel_group() if sizes else None
        self.loss_fn = CausalLoss(tensor_group, sum(sizes[: self.mine.tensor]))
        self.loss_fn.shifted = plan.strategy.context > 1

    def _wrap_in_ddp(self, chunk: Any, place: int) -> Any:
        """Wrap a model chunk for data parallelism.

        place: the chunk's number; from the second on, all gradients of a chunk are one bucket
        """
        config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=self.plan.training.gradient_accumulation_dtype == "fp32",
            use_distributed_optimizer=shards_states(self.plan),
        )
        whole = Float16Module(self.settings, chunk) if self.settings.bf16 else chunk
        return DistributedDataParallel(self.settings, config, whole, disable_bucketing=place > 0)

    def step(self, micro_batches: list[MicroBatch], learning_rate: float) -> StepResult:
        for chunk in self.engine:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        for optimizer, group in self.states.groups():
            group["lr"] = learning_rate * learning_rate_share(self.plan, optimizer)
            # Megatron's own scheduler sets it so: one value, times each group's factor.
            group["weight_decay"] = self.plan.optimizer.weight_decay * group.get("wd_mult", 1.0)
        loss, _ = self._pass(
            micro_batches, sum(m.predicted for m in micro_batches), forward_only=False
        )
        _, norm, _ = self.optimizer.step()
        return StepResult(loss=loss, grad_norm=float(norm))

    @torch.no_grad()
    def evaluate(self, held_out: ValidationBatches) -> tuple[float, int]:
        for chunk in self.engine:
            chunk.eval()
        found = self._pass(list(held_out), held_out.predicted, forward_only=True)
        for chunk in self.engine:
            chunk.train()
        return found

    def objective_metrics(self) -> dict[str, float]:
        return {}

    def _pass(
        self, batches: list[MicroBatch], predicted: int, *, forward_only: bool
    ) -> tuple[float, int]:
        """Return (loss over all labels of every data rank, number of labels).

        predicted: labels of this data rank
        """
        first = self.mine.tensor == 0 and self.mine.pipeline == 0 and self.mine.context == 0
        labels = int(self._sum(predicted if first else 0))
        self.loss_fn.scale = 1 / max(1, labels)
        feeds = [iter(batches) for _ in self.engine]
        losses = self.forward_backward(
            forward_step_func=self._forward,
            data_iterator=feeds if len(feeds) > 1 else feeds[0],
            model=self.engine if len(feeds) > 1 else self.engine[0],
            num_microbatches=len(batches),
            seq_length=self.plan.training.sequence_length,
            micro_batch_size=self.plan.strategy.micro_batch_size,
            forward_only=forward_only,
        )
        mine = sum(float(part["loss"]) for part in losses) if self.mine.tensor == 0 else 0.0
        return self._sum(mine), labels

    def _sum(self, number: float) -> float:
        """Sum a number over all ranks."""
        total = torch.tensor([number], dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.item()

    def _forward(
        self, feed: Iterator[MicroBatch], chunk: Any, *_: Any, return_schedule_plan: bool = False
    ) -> tuple[Any, Any]:
        """Run one micro-batch through one chunk, as Megatron's schedules call it.

        return_schedule_plan: return the chunk's schedule plan in place of its output
            (megatron/core/pipeline_parallel/combined_1f1b.py), with expert_overlap
        """
        whole, ranks = next(feed), self.plan.strategy.context
        batch = zigzag_shard(whole, ranks, self.mine.context)
        own = rank_positions(whole.input_ids.shape[1], ranks, self.mine.context)
        ids, places, visible = (
            batch.input_ids.to(self.device),
            own.expand(len(whole.input_ids), -1),
            None,
        )
        if whole.position_ids is not None:
            places, visible = (
                whole.position_ids[:, own],
                _document_mask(whole.position_ids)[:, :, own].to(self.device),
            )
        forward = chunk.build_schedule_plan if return_schedule_plan else chunk
        out = forward(input_ids=ids, position_ids=places.to(self.device), attention_mask=visible)

        def loss(
            logits: torch.Tensor,
        ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
            sizes = self.plan.tensor_parallel.vocabulary_sizes
            real = sizes[self.mine.tensor] if sizes else self.plan.model.vocabulary_size
            value = self.loss_fn(logits[..., :real], batch.labels.to(self.device))
            count = torch.tensor(batch.predicted, dtype=torch.int)
            return value, count, {"loss": value.detach()}

        return out, loss

    def owned_shards(self) -> Iterator[OwnedShard]:
        for piece in self.found:
            if not isinstance(piece.parameter, nn.Parameter):
                value = piece.parameter.detach().view(-1)
                yield OwnedShard(
                    name=piece.name,
                    shard_shape=tuple(piece.parameter.shape),
                    start=0,
                    states={"value": value},
                    live=value,
                    partitioned=False,
                )
                continue
            master = self.states.of(piece.parameter)
            if master is None:
                continue
            first = max(piece.own, master.start)
            numel = min(piece.own + piece.numel, master.start + master.numel) - first
            if numel <= 0:
                continue
            yield OwnedShard(
                name=piece.name,
                shard_shape=self.shards.shape(piece.name),
                start=piece.start + first - piece.own,
                states={
                    name: flat.narrow(0, first - master.start, numel)
                    for name, flat in master.states.items()
                },
                live=piece.parameter.data.view(-1).narrow(0, first, numel),
                partitioned=master.partitioned,
                copied=getattr(piece.parameter, "shared", False),
            )

    def parameter_shards(self) -> dict[str, ParameterShard]:
        """Return this rank's shard of each parameter, without the rows that pad a vocabulary."""
        held: dict[str, ParameterShard] = {}
        low = self.plan.low_precision
        planned = frozenset() if low is None else low.weights
        for piece in (p for p in self.found if not p.is_buffer):
            name, earlier = piece.name, held.get(piece.name)
            held[name] = ParameterShard(
                shape=self.shards.shape(name),
                resident_bytes=piece.numel * piece.parameter.element_size()
                + (earlier.resident_bytes if earlier else 0),
                is_trained=piece.parameter.requires_grad
                and (earlier is None or earlier.is_trained),
                in_low_precision=name in planned
                and piece.parameter in self.low_precision
                and (earlier is None or earlier.in_low_precision),
            )
        return held

    def counters(self) -> OptimizerCounters:
        return OptimizerCounters(updates=self.states.updates, loss_scale=None)

    def finish_restore(self, step: int, counters: OptimizerCounters) -> None:
        self.states.updates = counters.updates
        self.states.copy_masters_to_model(self.engine)


def _finalize(chunks: list[Any], tokens: torch.Tensor | None = None, **groups: Any) -> None:
    """Finalize gradients without dividing by `tokens`: the loss is divided already."""
    finalize_model_grads(chunks, None, **groups)


def _document_mask(places: torch.Tensor) -> torch.Tensor:
    """Return (B, 1, S, S), True where a query attends to an earlier key of its own document.

    places: (B, S), from 0 in each document

    Rotary angles depend on distances alone, so places in the whole sequence do as well.
    """
    number = (places == 0).cumsum(dim=1)
    causal = torch.ones(places.shape[1], places.shape[1], dtype=torch.bool).tril()
    return ((number[:, :, None] == number[:, None, :]) & causal)[:, None]

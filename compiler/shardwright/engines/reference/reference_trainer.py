"""Train the whole Hugging Face model in one process, with the optimizer that `verify` uses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import nn

from shardwright.engines.engine_table import engine_of
from shardwright.engines.reference.reference_optimizer import (
    ReferenceOptimizer,
    optimizer_builder,
)
from shardwright.engines.trainer_protocol import (
    OptimizerCounters,
    OwnedShard,
    ParameterShard,
    StepResult,
)
from shardwright.layout.optimizers import OPTIMIZERS
from shardwright.parallel.distributed_losses import (
    ChunkedLoss,
    causal_loss_class,
    micro_batch_loss,
    objective_loss,
    wrap_chunked_loss,
)
from shardwright.parallel.expert_parallel import micro_batch_weight, router_balance
from shardwright.parallel.layer_compile_and_recompute import apply_activation_checkpointing
from shardwright.parallel.lora_adapters import add_adapters, unique_parameters
from shardwright.parallel.low_precision_linears import convert_linears, low_precision_weights
from shardwright.parallel.micro_batches import MicroBatch, ValidationBatches
from shardwright.parallel.model_loading import DTYPES, conv1d_to_linear, open_model
from shardwright.parallel.parameter_names import named_buffers, named_parameters
from shardwright.parallel.token_scores import token_scores, trained_sequences
from shardwright.parallel.weight_loader import WeightLoader
from shardwright.plan.plan import Plan


def build_trainer(plan: Plan, folder: Path, *, resumes: bool = False) -> ReferenceTrainer:
    """Build the trainer.

    resumes: a checkpoint is loaded next, so no weights are read or initialized
    """
    model, weights = open_model(plan, folder, resumes=resumes)
    transposed = conv1d_to_linear(model)
    # Before the adapters, which are initialized already.
    WeightLoader(model, weights, {}, transposed, 0).fill([""])
    add_adapters(model, plan, transposed)
    convert_linears(model, plan, engine_of(plan).low_precision)
    apply_activation_checkpointing(model, plan)
    return ReferenceTrainer(plan, model, transposed)


class ReferenceTrainer:
    """Implement trainer_protocol.Trainer.

    engine: the model itself, with the plan's LoRA adapters
    """

    def __init__(self, plan: Plan, model: nn.Module, transposed: frozenset[str]) -> None:
        self.plan, self.transposed = plan, transposed
        self.device = torch.device(plan.device.torch_type)
        self.engine = model.to(self.device)
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.contiguous()  # checkpoints need flat views
        self._dtype = DTYPES[plan.training.precision]
        self.loss_fn = causal_loss_class(plan)()
        self.loss_fn.objective = objective_loss(plan.training.objective, self.device)
        self.balance = router_balance(plan, model)
        if isinstance(self.loss_fn, ChunkedLoss):
            wrap_chunked_loss(model, self.loss_fn)
        self.optimizer = ReferenceOptimizer(
            model,
            betas=plan.optimizer.betas,
            eps=plan.optimizer.eps,
            weight_decay=plan.optimizer.weight_decay,
            clipping=plan.training.gradient_clipping,
            dtype=DTYPES[plan.training.precision],
            build=optimizer_builder(plan.optimizer),
            moments=OPTIMIZERS[plan.optimizer.name].moments,
        )

    def step(self, micro_batches: list[MicroBatch], learning_rate: float) -> StepResult:
        micro_batches = self._trained(micro_batches)
        self.loss_fn.scale = 1 / max(1, sum(m.predicted for m in micro_batches))
        if self.balance is not None:
            self.balance.share = micro_batch_weight(self.plan, len(micro_batches))
        total = torch.zeros((), device=self.device)
        for m in micro_batches:
            loss = self._loss(m)
            loss.backward()
            total += loss.detach()
            if self.plan.training.gradient_accumulation_dtype == "fp32":
                self.optimizer.accumulate_master_gradients()
        self.optimizer.accumulate_master_gradients()
        return StepResult(loss=total.item(), grad_norm=self.optimizer.step(learning_rate))

    def evaluate(self, held_out: ValidationBatches) -> tuple[float, int]:
        self.loss_fn.scale = 1 / max(1, held_out.predicted)
        return self._forward(self._trained(held_out)), held_out.predicted

    @torch.no_grad()
    def _forward(self, batches: Iterable[MicroBatch]) -> float:
        self.engine.eval()
        total = sum(self._loss(m).item() for m in batches)
        self.engine.train()
        return total

    def _trained(self, batches: Iterable[MicroBatch]) -> list[MicroBatch]:
        """Return the sequences of a step, or of an evaluation, that the loss is of."""
        found = trained_sequences(
            self.loss_fn, self._forward, list(batches), is_counted=True, is_first_shard=True
        )
        return list(found)

    def objective_metrics(self) -> dict[str, float]:
        objective = self.loss_fn.objective
        return {} if objective is None else objective.metrics(is_counted=True)

    def token_scores(self, rows: ValidationBatches, top: int = 0) -> torch.Tensor:
        return token_scores(
            self.loss_fn,
            self._forward,
            rows,
            length=self.plan.training.sequence_length,
            first_token=0,
            is_counted=True,
            device=self.device,
            top=top,
        )

    def _loss(self, m: MicroBatch) -> torch.Tensor:
        return micro_batch_loss(
            self.engine, self.loss_fn, m, self.plan.model.attention, self.device, self._dtype
        )

    def owned_shards(self) -> Iterator[OwnedShard]:
        for name, p in named_parameters(self.plan, self.engine).items():
            states = self.optimizer.states(p) if p.requires_grad else {"value": p.detach()}
            yield _unsharded(name, p.detach(), states)
        for name, buffer in named_buffers(self.engine).items():
            yield _unsharded(name, buffer, {"value": buffer})

    def parameter_shards(self) -> dict[str, ParameterShard]:
        in_low_precision = low_precision_weights(self.engine)
        return {
            name: ParameterShard(
                shape=tuple(p.shape),
                resident_bytes=p.numel() * p.element_size(),
                is_trained=p.requires_grad,
                in_low_precision=id(p) in in_low_precision,
            )
            for name, p in unique_parameters(self.engine.named_parameters()).items()
        }

    def counters(self) -> OptimizerCounters:
        return OptimizerCounters(updates=self.optimizer.updates, loss_scale=None)

    def finish_restore(self, step: int, counters: OptimizerCounters) -> None:
        self.optimizer.updates = counters.updates
        self.optimizer.copy_masters_to_model()


def _unsharded(name: str, live: torch.Tensor, states: dict[str, torch.Tensor]) -> OwnedShard:
    return OwnedShard(
        name=name,
        shard_shape=tuple(live.shape),
        start=0,
        states={state: values.detach().view(-1) for state, values in states.items()},
        live=live.view(-1),
        partitioned=False,
    )

"""What training asks of an engine, whichever it is; engines/engine_table.py has a row for each.

A rank's place in the layout is the plan's (`plan.ranks`), and collectives of all ranks are
torch.distributed's: an engine is asked for neither. Nothing heavy is imported here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from shardwright.engines.engine_table import engine_of
from shardwright.plan.plan import Plan

if TYPE_CHECKING:
    import torch
    from torch import nn

    from shardwright.parallel.micro_batches import MicroBatch, ValidationBatches


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """loss: before the update. grad_norm: before clipping; both global."""

    loss: float
    grad_norm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedShard:
    """A range of one parameter's (or persistent buffer's) tensor-parallel shard, flattened, that
    this rank has. All tensors are views: copying into them restores.

    name: Hugging Face's. start: of states' elements in the flattened shard. states: state -> 1-D
    view; fp32 is the master of a trained weight, value what is not trained. live: the same elements
    of the weights that the model computes with, in their type.

    partitioned: other data ranks have other fragments of the same shard; else each has the same
    whole one. copied: of a tied parameter, which an earlier stage saves.
    """

    name: str
    shard_shape: tuple[int, ...]
    start: int
    states: dict[str, torch.Tensor]
    live: torch.Tensor
    partitioned: bool
    copied: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterShard:
    """shape: of this rank's part, before any flattening over data ranks. resident_bytes: what is in
    memory of it, in the type that the model computes with. is_trained: whether it gets
    gradients."""

    shape: tuple[int, ...]
    resident_bytes: int
    is_trained: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerCounters:
    """What an optimizer counts beside its tensors. updates: those made so far. loss_scale: fp16's,
    by the engine's own names; None in other precisions."""

    updates: int
    loss_scale: dict[str, float] | None


class Trainer(Protocol):
    """One rank's part of the model in training. engine: the engine's own object. transposed:
    weights that are held the other way round than Hugging Face has them, by name."""

    engine: Any
    device: torch.device
    transposed: frozenset[str]

    def step(self, micro_batches: list[MicroBatch], learning_rate: float) -> StepResult: ...

    def evaluate(self, held_out: ValidationBatches) -> tuple[float, int]:
        """(loss over all predicted tokens of every rank, their number)."""
        ...

    def owned(self) -> Iterator[OwnedShard]:
        """Of every parameter, trained or not, and every persistent buffer, in an order that does
        not change."""
        ...

    def held(self) -> dict[str, ParameterShard]:
        """By Hugging Face name."""
        ...

    def counters(self) -> OptimizerCounters: ...

    def finish_restore(self, step: int, counters: OptimizerCounters) -> None:
        """Collective. What `owned` gives holds a checkpoint's values by now: the model computes
        with them from here."""
        ...


class NoiseScaleTrainer(Trainer, Protocol):
    """Of an engine that measures the gradient noise scale."""

    def counted(self) -> Iterator[nn.Parameter]:
        """Those parameters of this rank that are trained and count here: of a data rank's ranks
        together, each number of the model once."""
        ...


class EngineRuntime(Protocol):
    """The module of an engine that its ranks call, in this order."""

    def prepare_process(self, plan: Plan, *, user_training_loop: bool) -> None:
        """Before anything of the engine is imported. user_training_loop: the process runs a user's
        script."""
        ...

    def open_groups(self, plan: Plan) -> None: ...

    def build_trainer(self, plan: Plan, folder: Path, *, resumes: bool = False) -> Trainer:
        """resumes: a checkpoint is loaded next, so that no weights are read or drawn."""
        ...

    def close_groups(self) -> None: ...


def engine_runtime(plan: Plan) -> EngineRuntime:
    return cast(EngineRuntime, import_module(engine_of(plan).runtime))

"""Define what training needs of an engine; engines/engine_table.py has a row for each.

A rank's coordinates are in the plan (`plan.ranks`), and collectives of all ranks are
torch.distributed's. Nothing heavy is imported here.
"""

from __future__ import annotations

import os
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
    """Hold the global loss before the update and the global gradient norm before clipping."""

    loss: float
    grad_norm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedShard:
    """Hold a range of one parameter's (or persistent buffer's) flattened tensor-parallel shard.

    All tensors are views: copying into them restores the state.

    name: Hugging Face's
    shard_shape: shape of the tensor-parallel shard
    start: first element of the states in the flattened shard
    states: 1-D view of each state; fp32 is the master of a trained weight, value an untrained
        parameter
    live: the same elements of the model's weights, in the compute dtype
    partitioned: other data ranks have other ranges of the shard; else each has the whole shard
    copied: a copy of a tied parameter that an earlier stage saves
    """

    name: str
    shard_shape: tuple[int, ...]
    start: int
    states: dict[str, torch.Tensor]
    live: torch.Tensor
    partitioned: bool
    copied: bool = False


def state_name(parameter: str, state: str) -> str:
    """Name a state that is not like its parameter, such as the mean of each row.

    Checkpoints hold it as a tensor of its own, as `value`.
    """
    return f"{parameter}@{state}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterShard:
    """Describe this rank's shard of a parameter.

    shape: before any flattening over data ranks
    resident_bytes: bytes in memory, in the compute dtype
    is_trained: gets gradients
    in_low_precision: the products with it run in the plan's low precision
    """

    shape: tuple[int, ...]
    resident_bytes: int
    is_trained: bool
    in_low_precision: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerCounters:
    """Hold an optimizer's counters.

    updates: number of updates so far
    loss_scale: fp16's state, by the engine's own names; None in other precisions
    """

    updates: int
    loss_scale: dict[str, float] | None


class Trainer(Protocol):
    """Train one rank's part of the model.

    engine: the engine's own object
    transposed: names of weights that are stored transposed to Hugging Face's
    """

    engine: Any
    device: torch.device
    transposed: frozenset[str]

    def step(self, micro_batches: list[MicroBatch], learning_rate: float) -> StepResult: ...

    def evaluate(self, held_out: ValidationBatches) -> tuple[float, int]:
        """Return (loss over all predicted tokens of every rank, number of these tokens)."""
        ...

    def objective_metrics(self) -> dict[str, float]:
        """Return the objective's own metrics over all examples since the last call; {} for the
        next-token objective. Collective."""
        ...

    def owned_shards(self) -> Iterator[OwnedShard]:
        """Yield the shard of every parameter, trained or not, and every persistent buffer, in a
        fixed order."""
        ...

    def parameter_shards(self) -> dict[str, ParameterShard]:
        """Return this rank's shard of each parameter, by Hugging Face name."""
        ...

    def counters(self) -> OptimizerCounters: ...

    def finish_restore(self, step: int, counters: OptimizerCounters) -> None:
        """Compute from the restored states on. Collective.

        Call after the tensors of `owned_shards` hold a checkpoint's values.
        """
        ...


class NoiseScaleTrainer(Trainer, Protocol):
    """Train with an engine that measures the gradient noise scale."""

    def counted(self) -> Iterator[nn.Parameter]:
        """Yield the trained parameters that this rank counts.

        Over a data rank's ranks together, each element of the model is counted once.
        """
        ...


class ScoringTrainer(Trainer, Protocol):
    """Train with an engine that also tells the log-probability of each label."""

    def token_scores(self, rows: ValidationBatches, top: int = 0) -> torch.Tensor:
        """Return each token's log-probability (sequences of all examples, S) in fp32 on the CPU; 0
        where a token is no label. Collective.

        top: K largest logits of each label's place too, as parallel/token_scores.py returns them
        """
        ...


class EngineRuntime(Protocol):
    """Define the module of an engine that its ranks call, in this order."""

    def prepare_process(self, plan: Plan, *, user_training_loop: bool) -> None:
        """Prepare the process before anything of the engine is imported.

        user_training_loop: the process runs a user's script
        """
        ...

    def open_groups(self, plan: Plan) -> None: ...

    def build_trainer(
        self, plan: Plan, folder: Path, *, resumes: bool = False, forward_only: bool = False
    ) -> Trainer:
        """Build the trainer.

        resumes: a checkpoint is loaded next, so no weights are read or initialized
        forward_only: it never steps, so no optimizer is built
        """
        ...

    def close_groups(self) -> None: ...


def share_host_cores(plan: Plan) -> None:
    """Give each rank of a host its share of the host's cores, for work on CPUs."""
    import torch

    ranks = int(os.environ.get("LOCAL_SIZE", str(plan.gpus_per_node)))
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))


def engine_runtime(plan: Plan) -> EngineRuntime:
    """Import the module that the plan's engine runs on its ranks."""
    return cast(EngineRuntime, import_module(engine_of(plan).runtime))

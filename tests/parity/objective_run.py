"""Train by an objective on the real engines, as one process does in plain_training.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar, cast

import numpy as np
from deepspeed import comm as dist

from shardwright.checkpoint.checkpoint_loader import load_checkpoint
from shardwright.checkpoint.checkpoint_saver import check_master_weights, save_checkpoint
from shardwright.data.dataset import Dataset
from shardwright.data.sequences import SubsetSequences
from shardwright.engines.deepspeed.deepspeed_trainers import DeepSpeedTrainer, build_trainer
from shardwright.engines.trainer_protocol import StepResult, Trainer
from shardwright.parallel.learning_rate import learning_rate
from shardwright.parallel.micro_batches import TrainingBatches, ValidationBatches
from shardwright.plan.plan import Plan
from shardwright.train.training_session import check_parameters
from tests.figures import training_apart
from tests.parity.harness import STEPS, Case, over_data_ranks
from tests.parity.optimizer_worker import SAVED, weight_difference
from tests.parity.plain_training import HELD_OUT, PlainObjective


class ObjectiveRun:
    """Hold one layout's plan, data and trainer."""

    data: Dataset

    def __init__(self, plan: Plan, folder: Path) -> None:
        trainer = build_trainer(plan, folder)
        assert isinstance(trainer, DeepSpeedTrainer)
        self.plan, self.trainer = plan, trainer
        self.at = plan.ranks[dist.get_rank()].data

    def train(self, first: int, last: int) -> tuple[list[StepResult], list[dict[str, float]]]:
        """Return the results and the objective's metrics of each step."""
        batches = TrainingBatches(self.plan, self.data)
        results, metrics = [], []
        for step in range(first, last + 1):
            rate = learning_rate(self.plan.optimizer, self.plan.scheduler, STEPS, step)
            results.append(self.trainer.step(batches.micro_batches(step, self.at), rate))
            metrics.append(self.trainer.objective_metrics())
        return results, metrics


Run = TypeVar("Run", bound=ObjectiveRun)


class ResumableCase(Protocol):
    @property
    def resumed(self) -> bool: ...


AnyCase = TypeVar("AnyCase", bound=Case)


@dataclass(frozen=True)
class TrainedRun(Generic[Run]):
    """Hold a layout that was trained, and evaluated on HELD_OUT examples.

    metrics: of each step, and last those of the evaluation. held_out: its loss, and how much it is
    a mean over.
    """

    run: Run
    results: list[StepResult]
    metrics: list[dict[str, float]]
    held_out: tuple[float, int]

    def differences(
        self, case: Case, wanted: PlainObjective, size: float = 1.0
    ) -> dict[str, float]:
        """Return the largest differences from the plain run.

        size: that losses are compared with
        """
        found = [r.loss for r in self.results], [r.grad_norm for r in self.results]
        apart = training_apart(*found, wanted.trained)
        return {
            "loss": apart["loss"] / size,
            "norm": apart["norm"],
            "held out": abs(self.held_out[0] - wanted.held_out_loss) / size,
            "weight": weight_difference(self.run.plan, self.run.trainer, wanted.trained),
        }


def trained_run(
    begin: Callable[[AnyCase, Path], Run], case: AnyCase, folder: Path
) -> TrainedRun[Run]:
    """Train all steps; of a resumed case the first SAVED over data ranks alone, whose checkpoint
    the case's layout resumes."""
    results: list[StepResult] = []
    metrics: list[dict[str, float]] = []
    is_resumed = cast(ResumableCase, case).resumed
    if is_resumed:
        begun = begin(over_data_ranks(case), folder / "writer")
        results, metrics = begun.train(1, SAVED)
        save_checkpoint(begun.plan, folder / "writer", begun.trainer, SAVED)
    run = begin(case, folder)
    if is_resumed:
        step = folder / "writer" / run.plan.checkpoint.directory / f"step-{SAVED:08d}"
        assert load_checkpoint(run.plan, run.trainer, step) == SAVED
    more = run.train(len(results) + 1, STEPS)
    results, metrics = results + more[0], metrics + more[1]
    check_master_weights(run.trainer.owned_shards())
    examples = SubsetSequences(run.data.train, np.arange(HELD_OUT))
    held_out = cast(Trainer, run.trainer).evaluate(ValidationBatches(run.plan, examples, run.at))
    metrics = [*metrics, run.trainer.objective_metrics()]
    check_parameters(
        run.plan, dist.get_rank(), run.trainer.parameter_shards(), run.trainer.transposed
    )
    return TrainedRun(run, results, metrics, held_out)

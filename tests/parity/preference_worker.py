"""Under the `deepspeed` launcher: preference training on the real engines, many cases of one world
size.

SHARDWRIGHT_CASES_OUT, SHARDWRIGHT_CASES: as of cases_worker.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
import torch
from deepspeed import comm as dist
from transformers import AutoModelForSequenceClassification

from shardwright.checkpoint.checkpoint_loader import load_checkpoint
from shardwright.checkpoint.checkpoint_saver import check_master_weights, save_checkpoint
from shardwright.checkpoint.huggingface_export import export_checkpoint
from shardwright.data.data_preparation import prepare
from shardwright.data.dataset import Dataset, open_dataset
from shardwright.data.sequences import ScoredSequences, SubsetSequences
from shardwright.engines.deepspeed.deepspeed_trainers import DeepSpeedTrainer, build_trainer
from shardwright.engines.trainer_protocol import StepResult, Trainer
from shardwright.parallel.learning_rate import learning_rate
from shardwright.parallel.micro_batches import TrainingBatches, ValidationBatches
from shardwright.plan.plan import Plan
from shardwright.train.reference_scores import ReferenceScores
from shardwright.train.training_session import check_parameters
from shardwright.utils.numeric_difference import largest_difference, max_abs_diff
from tests.figures import training_apart
from tests.parity.cases_worker import main
from tests.parity.engine_groups import compile_folder, from_rank_0
from tests.parity.harness import STEPS, over_data_ranks
from tests.parity.optimizer_worker import weight_difference
from tests.parity.preference import (
    HELD_OUT,
    METRICS,
    PlainRun,
    PreferenceCase,
    plain_run,
    rows,
    write_pairs,
)

SAVED = 4


class Run:
    """One layout's plan, data with the reference's scores, and trainer."""

    def __init__(self, case: PreferenceCase, folder: Path, *, resumes: bool = False) -> None:
        if dist.get_rank() == 0:
            write_pairs(case, folder)
        self.plan: Plan = compile_folder(folder)
        if dist.get_rank() == 0:
            prepare(self.plan, folder, limit_bytes=None)
        dist.barrier()
        self.data: Dataset = open_dataset(self.plan, folder)
        trainer = build_trainer(self.plan, folder)
        assert isinstance(trainer, DeepSpeedTrainer)
        self.trainer = trainer
        self.at = self.plan.ranks[dist.get_rank()].data
        if self.plan.training.objective.traits.reads_reference:
            reference = ReferenceScores(self.plan, folder, self.data, {})
            assert reference.are_missing
            reference.compute(trainer, self.at)
            self.data = reference.with_scores()

    def train(self, first: int, last: int) -> tuple[list[StepResult], list[dict[str, float]]]:
        batches = TrainingBatches(self.plan, self.data)
        results, metrics = [], []
        for step in range(first, last + 1):
            rate = learning_rate(self.plan.optimizer, self.plan.scheduler, STEPS, step)
            results.append(self.trainer.step(batches.micro_batches(step, self.at), rate))
            metrics.append(self.trainer.objective_metrics())
        return results, metrics


def measure(case: PreferenceCase, folder: Path) -> dict[str, float]:
    wanted = from_rank_0(lambda: plain_run(case))
    results: list[StepResult] = []
    metrics: list[dict[str, float]] = []
    first = 1
    if case.resumed:
        writer = over_data_ranks(case)
        begun = Run(writer, folder / "writer")
        results, metrics = begun.train(1, SAVED)
        save_checkpoint(begun.plan, folder / "writer", begun.trainer, SAVED)
        first = SAVED + 1
    run = Run(case, folder)
    if case.resumed:
        step = folder / "writer" / run.plan.checkpoint.directory / f"step-{SAVED:08d}"
        assert load_checkpoint(run.plan, run.trainer, step) == SAVED
    more = run.train(first, STEPS)
    results, metrics = results + more[0], metrics + more[1]
    check_master_weights(run.trainer.owned_shards())
    examples = SubsetSequences(run.data.train, np.arange(HELD_OUT))
    held_out = cast(Trainer, run.trainer).evaluate(ValidationBatches(run.plan, examples, run.at))
    assert held_out[1] == HELD_OUT
    metrics = [*metrics, run.trainer.objective_metrics()]
    check_parameters(
        run.plan, dist.get_rank(), run.trainer.parameter_shards(), run.trainer.transposed
    )
    sequences = run.data.train
    found = [r.loss for r in results], [r.grad_norm for r in results]
    size = max(1.0, *wanted.trained.losses)  # ipo's are squares
    apart = training_apart(*found, wanted.trained)
    return {
        "loss": apart["loss"] / size,
        "norm": apart["norm"],
        "held out": abs(held_out[0] - wanted.held_out_loss) / size,
        "weight": 0.0
        if case.lora_rank
        else weight_difference(run.plan, run.trainer, wanted.trained),
        "metrics": largest_difference(
            abs(step[name] - plain[name])
            for number, (step, plain) in enumerate(zip(metrics, wanted.metrics, strict=True))
            for name in METRICS
            # At the first step the model is the reference: rounding ranks the pairs.
            if number or name != "accuracy" or not isinstance(sequences, ScoredSequences)
        ),
        "scores": max_abs_diff(torch.from_numpy(sequences.scores), torch.from_numpy(wanted.scores))
        if isinstance(sequences, ScoredSequences)
        else 0.0,
        "exported": exported_difference(case, run, folder, wanted) if case.is_reward else 0.0,
    }


def exported_difference(case: PreferenceCase, run: Run, folder: Path, wanted: PlainRun) -> float:
    """Of the rewards that transformers computes of the exported model, for padded texts."""
    save_checkpoint(run.plan, folder, run.trainer, STEPS)

    def exported() -> float:
        step = folder / run.plan.checkpoint.directory / f"step-{STEPS:08d}"
        export_checkpoint(step, folder / "hf")
        model = AutoModelForSequenceClassification.from_pretrained(folder / "hf")
        ids = torch.cat([ids for ids, *_ in rows(case)[:HELD_OUT]])
        with torch.no_grad():
            found = model(input_ids=ids).logits.view(-1, 2)
        return max_abs_diff(found, torch.from_numpy(wanted.held_out_rewards))

    return from_rank_0(exported)


if __name__ == "__main__":
    main(measure, PreferenceCase)

"""Under the `deepspeed` launcher: distillation on the real engines, many cases of one world size.

SHARDWRIGHT_CASES_OUT, SHARDWRIGHT_CASES: as of cases_worker.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
from deepspeed import comm as dist

from shardwright.checkpoint.checkpoint_loader import load_checkpoint
from shardwright.checkpoint.checkpoint_saver import check_master_weights, save_checkpoint
from shardwright.data.data_preparation import prepare
from shardwright.data.dataset import open_dataset
from shardwright.data.score_digests import score_digests
from shardwright.data.score_files import (
    FORMAT,
    TRAIN,
    Block,
    PartManifest,
    ScoreManifest,
    pack_block,
    part_manifest,
    write_block,
    write_manifest,
)
from shardwright.data.sequences import SequenceBatch, SubsetSequences
from shardwright.engines.deepspeed.deepspeed_trainers import DeepSpeedTrainer, build_trainer
from shardwright.engines.trainer_protocol import StepResult, Trainer
from shardwright.parallel.learning_rate import learning_rate
from shardwright.parallel.micro_batches import TrainingBatches, ValidationBatches, label_mask
from shardwright.plan.plan import Plan
from shardwright.train.teacher_scores import with_teacher
from shardwright.utils.numeric_difference import largest_difference
from tests.figures import training_apart
from tests.parity.cases_worker import main
from tests.parity.distillation import (
    HELD_OUT,
    METRICS,
    DistillationCase,
    PlainRun,
    TopTokens,
    plain_run,
    teacher_tokens,
    write_recipe,
)
from tests.parity.engine_groups import compile_folder, from_rank_0
from tests.parity.harness import LENGTH, STEPS, over_data_ranks
from tests.parity.optimizer_worker import weight_difference

SAVED = 4


def write_teacher(plan: Plan, folder: Path, every: SequenceBatch, top: TopTokens) -> None:
    """A score file of two blocks, as `shardwright score` writes it."""
    ids, values = top
    count, length, k = ids.shape
    place, blocks = folder / "teacher", []
    for start, stop in ((0, count // 3), (count // 3, count)):
        here = slice(start, stop)
        is_label = label_mask(plan, every)[here]
        columns = [np.zeros((stop - start, length, 2)), ids[here], values[here]]
        packed = pack_block(is_label, np.concatenate(columns, axis=-1).astype(np.float32), k)
        name = f"train-{start:05d}.safetensors"
        block = Block(
            file=name,
            start=start,
            stop=stop,
            tokens=len(packed["places"]),
            sha256=write_block(place / name, packed),
        )
        blocks.append((block, packed))
    parts = {TRAIN: part_manifest(blocks, count)}
    write_manifest(place, manifest(k, parts, score_digests(plan, folder)))


def manifest(top: int, parts: dict[str, PartManifest], digests: dict[str, str]) -> ScoreManifest:
    return ScoreManifest(
        format=FORMAT,
        digests=digests,
        top=top,
        sequence_length=LENGTH,
        sequences_per_example=1,
        parts=parts,
    )


class Run:
    """One layout's plan, data with the teacher's tokens, and trainer.

    wanted: the plain run, on every rank
    """

    def __init__(self, case: DistillationCase, folder: Path) -> None:
        if dist.get_rank() == 0:
            write_recipe(case, folder)
            (folder / "teacher").mkdir()
            write_manifest(folder / "teacher", manifest(case.top, {}, {}))  # compile reads it
        self.plan = compile_folder(folder)
        if dist.get_rank() == 0:
            prepare(self.plan, folder, limit_bytes=None)
        dist.barrier()
        data = open_dataset(self.plan, folder)
        every = data.train.read(np.arange(STEPS * case.batch))
        self.teacher = from_rank_0(lambda: teacher_tokens(case, every))
        if dist.get_rank() == 0:
            write_teacher(self.plan, folder, every, self.teacher)
        dist.barrier()
        self.every, self.data = every, with_teacher(self.plan, folder, data)
        trainer = build_trainer(self.plan, folder)
        assert isinstance(trainer, DeepSpeedTrainer)
        self.trainer = trainer
        self.at = self.plan.ranks[dist.get_rank()].data

    def train(self, first: int, last: int) -> tuple[list[StepResult], list[dict[str, float]]]:
        batches = TrainingBatches(self.plan, self.data)
        results, metrics = [], []
        for step in range(first, last + 1):
            rate = learning_rate(self.plan.optimizer, self.plan.scheduler, STEPS, step)
            results.append(self.trainer.step(batches.micro_batches(step, self.at), rate))
            metrics.append(self.trainer.objective_metrics())
        return results, metrics


def measure(case: DistillationCase, folder: Path) -> dict[str, float]:
    results: list[StepResult] = []
    metrics: list[dict[str, float]] = []
    first = 1
    if case.resumed:
        begun = Run(over_data_ranks(case), folder / "writer")
        results, metrics = begun.train(1, SAVED)
        save_checkpoint(begun.plan, folder / "writer", begun.trainer, SAVED)
        first = SAVED + 1
    run = Run(case, folder)
    if case.resumed:
        step = folder / "writer" / run.plan.checkpoint.directory / f"step-{SAVED:08d}"
        assert load_checkpoint(run.plan, run.trainer, step) == SAVED
    wanted: PlainRun = from_rank_0(lambda: plain_run(case, run.every, run.teacher))
    more = run.train(first, STEPS)
    results, metrics = results + more[0], metrics + more[1]
    check_master_weights(run.trainer.owned_shards())
    examples = SubsetSequences(run.data.train, np.arange(HELD_OUT))
    held_out = cast(Trainer, run.trainer).evaluate(ValidationBatches(run.plan, examples, run.at))
    metrics = [*metrics, run.trainer.objective_metrics()]
    found = [r.loss for r in results], [r.grad_norm for r in results]
    apart = training_apart(*found, wanted.trained)
    return {
        "loss": apart["loss"],
        "norm": apart["norm"],
        "held out": abs(held_out[0] - wanted.held_out_loss),
        "weight": 0.0
        if case.lora_rank
        else weight_difference(run.plan, run.trainer, wanted.trained),
        "metrics": largest_difference(
            abs(step[name] - plain[name])
            for step, plain in zip(metrics, wanted.metrics, strict=True)
            for name in METRICS
        ),
    }


if __name__ == "__main__":
    main(measure, DistillationCase)

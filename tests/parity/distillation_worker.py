"""Under the `deepspeed` launcher: distillation on the real engines, many cases of one world size.

SHARDWRIGHT_CASES_OUT, SHARDWRIGHT_CASES: as of cases_worker.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from deepspeed import comm as dist

from shardwright.data.data_preparation import prepare
from shardwright.data.dataset import open_dataset
from shardwright.data.score_digests import score_digests
from shardwright.data.score_files import (
    FORMAT,
    TRAIN,
    PartManifest,
    ScoreManifest,
    pack_block,
    part_manifest,
    write_block,
    write_manifest,
)
from shardwright.data.sequences import SequenceBatch
from shardwright.parallel.micro_batches import label_mask
from shardwright.plan.plan import Plan
from shardwright.train.teacher_scores import with_teacher
from shardwright.utils.numeric_difference import largest_difference
from tests.parity.cases_worker import main
from tests.parity.distillation import (
    METRICS,
    DistillationCase,
    TopTokens,
    plain_run,
    teacher_tokens,
    write_recipe,
)
from tests.parity.engine_groups import compile_folder, from_rank_0
from tests.parity.harness import LENGTH, STEPS
from tests.parity.objective_run import ObjectiveRun, trained_run
from tests.parity.plain_training import PlainObjective


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
        blocks.append(write_block(place / name, start, packed))
    parts = {TRAIN: part_manifest(blocks)}
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


class Run(ObjectiveRun):
    """Hold one layout's plan, data with the teacher's tokens, and trainer."""

    def __init__(self, case: DistillationCase, folder: Path) -> None:
        if dist.get_rank() == 0:
            write_recipe(case, folder)
            (folder / "teacher").mkdir()
            write_manifest(folder / "teacher", manifest(case.top, {}, {}))  # compile reads it
        plan = compile_folder(folder)
        if dist.get_rank() == 0:
            prepare(plan, folder, limit_bytes=None)
        dist.barrier()
        data = open_dataset(plan, folder)
        self.every = data.train.read(np.arange(STEPS * case.batch))
        self.teacher = from_rank_0(lambda: teacher_tokens(case, self.every))
        if dist.get_rank() == 0:
            write_teacher(plan, folder, self.every, self.teacher)
        dist.barrier()
        self.data = with_teacher(plan, folder, data)
        super().__init__(plan, folder)


def measure(case: DistillationCase, folder: Path) -> dict[str, float]:
    found = trained_run(Run, case, folder)
    run = found.run
    wanted: PlainObjective = from_rank_0(lambda: plain_run(case, run.every, run.teacher))
    return found.differences(case, wanted) | {
        "metrics": largest_difference(
            abs(step[name] - plain[name])
            for step, plain in zip(found.metrics, wanted.metrics, strict=True)
            for name in METRICS
        )
    }


if __name__ == "__main__":
    main(measure, DistillationCase)

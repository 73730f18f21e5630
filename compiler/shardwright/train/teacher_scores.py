"""Give a distillation's sequences what its teacher says of them, from a score file."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from torch import distributed as dist

from shardwright.data.dataset import Dataset
from shardwright.data.score_digests import teacher_digests
from shardwright.data.score_files import TRAIN, VALIDATION, ScoreFile, TaughtSequences
from shardwright.plan.plan import Plan
from shardwright.train.host_consistency import check_on_hosts

SECONDS_BETWEEN_LINES = 10.0


def with_teacher(plan: Plan, folder: Path, data: Dataset) -> Dataset:
    """Return the data whose sequences have their teacher's most probable tokens. One rank a host
    checks the file. Collective.

    Raises Refusal on every rank: SW6270 where the plan names no score file or a block is missing,
    SW6271 where its scores are of other data, or of another tokenizer, chat template or sequence
    length.
    """
    teacher = plan.training.objective.teacher
    assert teacher is not None, "the recipe is checked"

    def check() -> None:
        file = ScoreFile(teacher)
        file.check(teacher_digests(plan, folder))
        shown = time.monotonic()
        for checked, total in file.check_blocks():
            if dist.get_rank() == 0 and time.monotonic() - shown > SECONDS_BETWEEN_LINES:
                shown = time.monotonic()
                print(f"teacher: {checked:,} of {total:,} blocks checked", flush=True)

    check_on_hosts(check)
    file = ScoreFile(teacher)
    held_out = data.validation
    return replace(
        data,
        train=TaughtSequences(data.train, file.part(TRAIN)),
        validation=None if held_out is None else TaughtSequences(held_out, file.part(VALIDATION)),
    )

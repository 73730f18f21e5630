"""Give a distillation's sequences what its teacher says of them, from a score file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from shardwright.data.dataset import Dataset
from shardwright.data.score_digests import teacher_digests
from shardwright.data.score_files import TRAIN, VALIDATION, ScoreFile, TaughtSequences
from shardwright.plan.plan import Plan


def with_teacher(plan: Plan, folder: Path, data: Dataset) -> Dataset:
    """Return the data whose sequences have their teacher's most probable tokens.

    Raises Refusal: SW6270 where the plan names no score file, SW6271 where its scores are of other
    data, or of another tokenizer, chat template or sequence length.
    """
    assert plan.training.objective.teacher is not None, "the recipe is checked"
    file = ScoreFile(plan.training.objective.teacher)
    file.check(teacher_digests(plan, folder))
    held_out = data.validation
    return replace(
        data,
        train=TaughtSequences(data.train, file.part(TRAIN)),
        validation=None if held_out is None else TaughtSequences(held_out, file.part(VALIDATION)),
    )

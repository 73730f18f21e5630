"""Give a preference run's examples their log-probabilities under the reference, from a score file:
one that `training.objective.reference` names, or the run's own of its starting weights."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
from torch import distributed as dist

from shardwright.data.dataset import Dataset
from shardwright.data.score_digests import reference_digests, reference_score_file
from shardwright.data.score_files import TRAIN, VALIDATION, ScoreFile
from shardwright.data.sequences import Indices, ScoredSequences, SequenceDataset
from shardwright.diagnostics import Refusal, refusal
from shardwright.plan.plan import Plan


def with_reference(data: Dataset, open_file: Callable[[], ScoreFile]) -> Dataset:
    """Return the data whose examples have the scores of a file, which rank 0 opens and reads.
    Collective. Raises the file's Refusal on every rank."""
    told: list[object] = [None]
    if dist.get_rank() == 0:
        try:
            file = open_file()
            rows = {TRAIN: data.train, VALIDATION: data.validation}
            told = [{n: _scores(file, n, own) for n, own in rows.items() if own is not None}]
        except Refusal as refused:
            told = [refused]
    dist.broadcast_object_list(told, src=0)
    if isinstance(told[0], Refusal):
        raise told[0]
    scores = told[0]
    assert isinstance(scores, dict)
    held_out = data.validation
    return replace(
        data,
        train=ScoredSequences(data.train, *scores[TRAIN]),
        validation=held_out and ScoredSequences(held_out, *scores[VALIDATION]),
    )


def _scores(
    file: ScoreFile, name: str, rows: SequenceDataset
) -> tuple[npt.NDArray[np.float64], Indices]:
    """Return the log-probabilities of the completions of a part, and where each example's
    begin."""
    if rows.read(np.zeros(1, dtype=np.int64)).completions is None:
        scores, firsts = file.part(name).sums()
        return scores, firsts[:: file.manifest.sequences_per_example]
    return file.part(name).sums(lambda examples: cast(Indices, rows.read(examples).completions))


def open_reference(plan: Plan, folder: Path) -> ScoreFile:
    """Open the score file of `training.objective.reference`. Raises SW6270, SW6271, SW6274."""
    reference = plan.training.objective.reference
    assert reference is not None
    path = reference_score_file(plan, folder)
    if path != Path(reference) and not path.is_dir():
        raise refusal(
            "SW6274",
            f"the scores of the reference {reference!r} are not in {str(path)!r}",
            "`shardwright run` makes them. Where it does not start the ranks, run `shardwright "
            f"score {shlex.quote(str(folder))} --weights {shlex.quote(reference)} -o "
            f"{shlex.quote(str(path))}` first.",
        )
    file = ScoreFile(path)
    file.check(reference_digests(plan, folder))
    return file

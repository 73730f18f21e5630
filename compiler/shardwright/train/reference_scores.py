"""Score a preference run's pairs under its starting weights, once and before the first step, so
that no second model is in memory.

run/reference/KEY/ has a file for each block of examples: (examples, sequences of each) fp64
log-probabilities. KEY is a hash of all that decides them, so that scores of other weights, data or
lengths are never read.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import distributed as dist

from shardwright.data.dataset import Dataset, files_digest
from shardwright.data.score_digests import reference_digests, reference_score_file
from shardwright.data.score_files import TRAIN, VALIDATION, ScoreFile
from shardwright.data.sequences import ScoredSequences, SequenceDataset, SubsetSequences
from shardwright.diagnostics import Refusal, refusal
from shardwright.engines.trainer_protocol import ScoringTrainer, Trainer
from shardwright.parallel.micro_batches import ValidationBatches, rows_per_example
from shardwright.plan.plan import Plan
from shardwright.utils.json_values import canonical_hash

BLOCK_TOKENS = 2**24
"""Tokens of a file's examples: what an interruption loses at most."""

Scores = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """Hold a block of examples [start, stop) of the training or validation data."""

    path: Path
    rows: SequenceDataset
    start: int
    stop: int

    def read(self, sequences: int) -> Scores | None:
        """Return the scores, None where there are none for these examples."""
        try:
            found = np.load(self.path, allow_pickle=False)
        except (OSError, ValueError, EOFError):
            return None
        shape = (self.stop - self.start, sequences)
        return found if found.shape == shape and found.dtype == np.float64 else None


class ReferenceScores:
    """Find or compute the scores of a plan's data. Every rank makes the same calls."""

    def __init__(self, plan: Plan, folder: Path, data: Dataset, digests: Mapping[str, str]) -> None:
        """Look for scores of an earlier attempt. Collective.

        digests: of the data, as data_fingerprints returns them
        """
        self._plan, self._data = plan, data
        self._sequences = rows_per_example(plan) or 1
        tokens = self._sequences * plan.training.sequence_length
        self._block_examples = max(1, BLOCK_TOKENS // tokens)
        told = [_key(plan, folder, digests) if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(told, src=0)
        self._folder = folder / "run" / "reference" / told[0]
        self._is_found = [block.read(self._sequences) is not None for block in self._blocks()]
        everyone: list[list[bool]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, self._is_found)
        # A host that lacks a block computes it with all others.
        self._is_found = [all(each) for each in zip(*everyone, strict=True)]

    @property
    def are_missing(self) -> bool:
        """Return whether the starting weights must be run over some of the data."""
        return not all(self._is_found)

    def compute(self, trainer: Trainer, data_rank: int) -> None:
        """Compute the missing blocks with the starting weights, which the trainer holds.
        Collective."""
        scorer = cast(ScoringTrainer, trainer)
        began, done = time.monotonic(), 0
        missing = [b for b, found in zip(self._blocks(), self._is_found, strict=True) if not found]
        total = sum(block.stop - block.start for block in missing)
        for block in missing:
            examples = SubsetSequences(block.rows, np.arange(block.start, block.stop))
            rows = ValidationBatches(self._plan, examples, data_rank)
            by_sequence = scorer.token_scores(rows).double().sum(dim=1)
            found = by_sequence.reshape(-1, self._sequences)
            _check_finite(found, block)
            if int(os.environ["LOCAL_RANK"]) == 0:
                self._folder.mkdir(parents=True, exist_ok=True)
                temporary = block.path.with_name(f".{block.path.stem}.{os.getpid()}.npy")
                np.save(temporary, found.numpy())
                os.replace(temporary, block.path)
            done += block.stop - block.start
            if dist.get_rank() == 0:
                seconds = time.monotonic() - began
                left = seconds / done * (total - done)
                print(
                    f"reference: {done:,} of {total:,} examples scored in {seconds:,.0f} s"
                    + (f", about {left:,.0f} s left" if left else ""),
                    flush=True,
                )
        dist.barrier()  # a host's other ranks read what its first wrote

    def with_scores(self) -> Dataset:
        """Return the data whose sequences have their scores."""
        scores: dict[int, list[Scores]] = {}
        for block in self._blocks():
            found = block.read(self._sequences)
            if found is None:
                raise refusal(
                    "SW6265",
                    f"{str(block.path)!r} cannot be read back",
                    "Look at the disk of the compiled folder, which every rank of a host reads, "
                    "and start the run again: the scores are computed again.",
                )
            scores.setdefault(id(block.rows), []).append(found)

        def scored(rows: SequenceDataset) -> ScoredSequences:
            return ScoredSequences(rows, np.concatenate(scores[id(rows)]))

        held_out = self._data.validation
        return replace(
            self._data,
            train=scored(self._data.train),
            validation=None if held_out is None else scored(held_out),
        )

    def _blocks(self) -> Iterator[_Block]:
        for name, rows in (("train", self._data.train), ("validation", self._data.validation)):
            for start in range(0, 0 if rows is None else len(rows), self._block_examples):
                assert rows is not None
                yield _Block(
                    path=self._folder / f"{name}-{start // self._block_examples:05d}.npy",
                    rows=rows,
                    start=start,
                    stop=min(start + self._block_examples, len(rows)),
                )


def with_scores_of_file(plan: Plan, folder: Path, data: Dataset) -> Dataset:
    """Return the data with the scores of `training.objective.reference`, which rank 0 reads.
    Collective. Raises Refusal on every rank: SW6270, SW6271, SW6274."""
    told: list[dict[str, Scores] | Refusal | None] = [None]
    if dist.get_rank() == 0:
        try:
            told = [_scores_of_file(plan, folder)]
        except Refusal as refused:
            told = [refused]
    dist.broadcast_object_list(told, src=0)
    if isinstance(told[0], Refusal):
        raise told[0]
    scores = told[0]
    assert scores is not None
    held_out = data.validation
    return replace(
        data,
        train=ScoredSequences(data.train, scores[TRAIN]),
        validation=held_out and ScoredSequences(held_out, scores[VALIDATION]),
    )


def _scores_of_file(plan: Plan, folder: Path) -> dict[str, Scores]:
    """Read the log-probabilities (examples, sequences of each) of each part of the data."""
    objective = plan.training.objective
    assert objective.reference is not None
    path = reference_score_file(plan, folder)
    if path != Path(objective.reference) and not path.is_dir():
        raise refusal(
            "SW6274",
            f"the scores of the reference {objective.reference!r} are not in {str(path)!r}",
            "`shardwright run` makes them. Where it does not start the ranks, run `shardwright "
            f"score {shlex.quote(str(folder))} --weights {shlex.quote(objective.reference)} -o "
            f"{shlex.quote(str(path))}` first.",
        )
    file = ScoreFile(path)
    file.check(reference_digests(plan, folder))
    each = rows_per_example(plan) or 1
    return {name: file.part(name).sums().reshape(-1, each) for name in file.manifest.parts}


def _key(plan: Plan, folder: Path, digests: Mapping[str, str]) -> str:
    """Hash what decides the scores: weights, data, the part held out, and how they are computed."""
    weights: object = [plan.model.config_hash, plan.training.seed]
    if plan.model.weights_path is not None:
        names = ("*.safetensors", "*.bin", "*.json")
        files = [path for name in names for path in Path(plan.model.weights_path).glob(name)]
        weights = files_digest(sorted(files), blocks=64)
    validation = plan.validation
    split = None if validation is None else [validation.fraction, plan.training.seed]
    return canonical_hash(
        {
            "weights": weights,
            "data": dict(digests),
            "split": split,
            "sequence_length": plan.training.sequence_length,
            "precision": plan.training.precision,
            "low_precision": None if plan.low_precision is None else plan.low_precision.format,
        }
    )[:32]


def _check_finite(scores: torch.Tensor, block: _Block) -> None:
    """Raise SW6264, on all ranks, where the starting weights give a score that is no number."""
    wrong = (~scores.isfinite().all(dim=1)).nonzero().flatten().tolist()
    if wrong:
        raise refusal(
            "SW6264",
            f"the starting weights give {len(wrong)} of {len(scores)} examples a log-probability "
            f"that is not finite; the first is number {block.start + wrong[0] + 1} of "
            f"{block.path.name.split('-')[0]}",
            "Nothing was trained. Use precision: bf16 or fp32 in place of fp16, or other weights.",
        )

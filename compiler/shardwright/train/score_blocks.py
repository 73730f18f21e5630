"""Compute the scores of a plan's data on its ranks, block by block: a forward pass over every
sequence, which an interruption costs one block at most.

PLACE/KEY/ has a file for each finished block, and is a score file once it has a manifest. KEY is a
hash of all that decides the scores, so that scores of other weights, data or lengths are never
read.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import distributed as dist

from shardwright.data.dataset import Dataset
from shardwright.data.image_captions import ContrastiveProcessor
from shardwright.data.image_inputs import ImageProcessor
from shardwright.data.score_digests import score_digests
from shardwright.data.score_files import (
    FORMAT,
    TRAIN,
    VALIDATION,
    Block,
    ScoreFile,
    ScoreManifest,
    describe_block,
    pack_block,
    part_manifest,
    read_block,
    write_block,
    write_manifest,
)
from shardwright.data.sequences import SequenceDataset, SubsetSequences
from shardwright.diagnostics import refusal
from shardwright.engines.trainer_protocol import ScoringTrainer, Trainer
from shardwright.parallel.micro_batches import ValidationBatches, label_mask, rows_per_example
from shardwright.plan.plan import Plan
from shardwright.utils.json_values import canonical_hash

BLOCK_VALUES = 2**24
"""Numbers of a block's tokens: what an interruption loses at most, and a rank has in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _BlockPlan:
    """Name a block of examples [start, stop) of a part, the training or the validation data."""

    part: str
    file: str
    rows: SequenceDataset
    start: int
    stop: int


class ScoreBlocks:
    """Find and compute the blocks of a plan's data. Every rank makes the same calls; rank 0 alone
    reads and writes files."""

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        data: Dataset,
        place: Path,
        *,
        top: int = 0,
        block_examples: int | None = None,
    ) -> None:
        """Look for blocks of an earlier attempt. Collective.

        folder: the compiled one, whose data is prepared
        top: K of `score --top`
        block_examples: of a block; None for as many as BLOCK_VALUES allow
        """
        self._plan, self._top = plan, top
        self._each = rows_per_example(plan) or 1
        width = 2 + 2 * top if top else 1
        values = self._each * plan.training.sequence_length * width
        self._block_examples = block_examples or max(1, BLOCK_VALUES // values)
        parts = {TRAIN: data.train, VALIDATION: data.validation}
        self._parts = {name: rows for name, rows in parts.items() if rows is not None}
        self._blocks = list(self._planned_blocks())
        self._written: dict[str, Block] = {}
        if dist.get_rank() == 0:
            self._digests = score_digests(plan, folder)
            key = canonical_hash([FORMAT, self._digests, top, self._block_examples])[:32]
            self._folder = place / key
            self._folder.mkdir(parents=True, exist_ok=True)
            found = {block.file: self._read(block) for block in self._blocks}
            self._written = {name: block for name, block in found.items() if block is not None}
        told = [list(self._written)]
        dist.broadcast_object_list(told, src=0)
        self._missing = [block for block in self._blocks if block.file not in told[0]]

    @property
    def are_missing(self) -> bool:
        """Return whether the model must be run over some of the data."""
        return bool(self._missing)

    def compute(
        self, trainer: Trainer, image_processor: ImageProcessor | ContrastiveProcessor | None = None
    ) -> Iterator[str]:
        """Compute the missing blocks with the trainer's weights; yield a block's file name before
        it is computed. Collective. Raises SW6273, on all ranks."""
        rank, plan = dist.get_rank(), self._plan
        total, done, began = sum(b.stop - b.start for b in self._missing), 0, time.monotonic()
        found = len(self._blocks) - len(self._missing)
        if rank == 0 and found and self._missing:
            print(f"score: {found} of {len(self._blocks)} blocks were computed before", flush=True)
        for block in self._missing:
            yield block.file
            numbers = np.arange(block.start, block.stop)
            batches = ValidationBatches(
                plan,
                SubsetSequences(block.rows, numbers),
                plan.ranks[rank].data,
                image_processor,
            )
            values = cast(ScoringTrainer, trainer).token_scores(batches, self._top)
            self._check_finite(block, values[..., 0] if self._top else values)
            done += len(numbers)
            if rank != 0:
                continue
            is_label = label_mask(plan, block.rows.read(numbers))
            self._written[block.file] = write_block(
                self._folder / block.file,
                block.start * self._each,
                pack_block(is_label, values.numpy(), self._top),
            )
            seconds = time.monotonic() - began
            left = seconds / done * (total - done)
            print(
                f"score: {done:,} of {total:,} examples scored in {seconds:,.0f} s"
                + (f", about {left:,.0f} s left" if left else ""),
                flush=True,
            )

    def finish(self) -> ScoreFile:
        """Make the folder of the blocks a score file, on rank 0."""
        parts: dict[str, list[Block]] = {name: [] for name in self._parts}
        for block in self._blocks:
            parts[block.part].append(self._written[block.file])
        manifest = ScoreManifest(
            format=FORMAT,
            digests=self._digests,
            top=self._top,
            sequence_length=self._plan.training.sequence_length,
            sequences_per_example=self._each,
            parts={name: part_manifest(blocks) for name, blocks in parts.items()},
        )
        write_manifest(self._folder, manifest)
        return ScoreFile(self._folder)

    def _check_finite(self, block: _BlockPlan, scores: torch.Tensor) -> None:
        wrong = (~scores.isfinite().all(dim=1)).nonzero().flatten().tolist()
        if wrong:
            raise refusal(
                "SW6273",
                f"the model gives {len(wrong)} of {len(scores)} sequences a log-probability that "
                f"is not finite; the first is of example {block.start + wrong[0] // self._each + 1}"
                f" of {block.part}",
                "Nothing was trained. Use training.precision bf16 or fp32 in place of fp16, or "
                "other weights.",
            )

    def _read(self, planned: _BlockPlan) -> Block | None:
        """Describe the block that an earlier attempt wrote; None where there is none, or a damaged
        one."""
        found = read_block(self._folder / planned.file)
        if found is None:
            return None
        block = describe_block(planned.file, planned.start * self._each, *found)
        return block if block.stop == planned.stop * self._each else None

    def _planned_blocks(self) -> Iterator[_BlockPlan]:
        for part, rows in self._parts.items():
            for number, start in enumerate(range(0, len(rows), self._block_examples)):
                yield _BlockPlan(
                    part=part,
                    file=f"{part}-{number:05d}.safetensors",
                    rows=rows,
                    start=start,
                    stop=min(start + self._block_examples, len(rows)),
                )

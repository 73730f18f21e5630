"""Score a compiled folder's data on its ranks, instead of training: a forward pass over every
sequence, block by block.

run/scores/KEY/ has a file for each finished block, and a score file is that folder with a manifest.
KEY is a hash of all that decides the scores.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import distributed as dist

from shardwright.data.data_preparation import MAX_UNPREPARED_BYTES, prepare
from shardwright.data.dataset import Dataset, resolve
from shardwright.data.score_digests import score_digests
from shardwright.data.score_files import (
    FORMAT,
    TRAIN,
    VALIDATION,
    Arrays,
    Block,
    PartManifest,
    ScoreManifest,
    pack_block,
    part_manifest,
    read_block,
    write_block,
    write_manifest,
)
from shardwright.data.sequences import SequenceDataset, SubsetSequences
from shardwright.diagnostics import refusal
from shardwright.engines.trainer_protocol import ScoringTrainer, engine_runtime
from shardwright.monitor.rank_monitor import RankMonitor
from shardwright.monitor.run_files import write_json, write_status
from shardwright.parallel.micro_batches import (
    ValidationBatches,
    build_image_processor,
    label_mask,
    rows_per_example,
)
from shardwright.plan.folder_paths import SCORE_FILE
from shardwright.plan.plan import Plan
from shardwright.train.host_consistency import check_same_data_on_hosts
from shardwright.train.training_session import check_parameters, open_attempt, rank_record
from shardwright.train.training_worker import StopRequest
from shardwright.utils.json_values import canonical_hash
from shardwright.utils.run_lease import Lease

BLOCK_VALUES = 2**24
"""Numbers of a block's tokens: what an interruption loses at most, and a rank has in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """Hold what SCORE_FILE says.

    output: the score file, an absolute path
    top: K of `--top`, 0 without
    block_examples: of a block; None for as many as BLOCK_VALUES allow
    """

    output: str
    top: int
    block_examples: int | None


def score(
    plan: Plan,
    folder: Path,
    rank: int,
    resume: str | None,
    lease: Lease | None,
    watch: RankMonitor,
    stop: StopRequest,
) -> None:
    """Compute the blocks that are missing and publish the score file. Collective.

    resume, lease: as begin_attempt_on_ranks takes them
    """
    attempt = open_attempt(plan, folder, rank, resume, lease, watch)
    request = ScoreRequest(**json.loads((folder / SCORE_FILE).read_text(encoding="utf-8")))
    if int(os.environ["LOCAL_RANK"]) == 0:
        prepare(plan, folder, limit_bytes=MAX_UNPREPARED_BYTES)
    dist.barrier()
    plan, data = resolve(plan, folder)
    check_same_data_on_hosts(plan, folder)
    scoring = _Scoring(plan, folder, data, request)
    is_done = scoring.compute(rank, watch, stop) if scoring.are_missing else True
    if rank == 0 and is_done:
        scoring.publish()
    dist.barrier()
    if rank == 0:
        write_status(folder, "done" if is_done else "preempted", attempt.number, step=0)
    if lease is not None:
        lease.release()


class _Scoring:
    """Find and compute the blocks of a plan's data. Rank 0 alone reads and writes files."""

    def __init__(self, plan: Plan, folder: Path, data: Dataset, request: ScoreRequest) -> None:
        """Look for blocks of an earlier attempt. Collective."""
        self._plan, self._data, self._request, self._folder = plan, data, request, folder
        self._each = rows_per_example(plan) or 1
        width = 2 + 2 * request.top if request.top else 1
        values = self._each * plan.training.sequence_length * width
        self._block_examples = request.block_examples or max(1, BLOCK_VALUES // values)
        told: list[object] = [None]
        if dist.get_rank() == 0:
            self._digests = score_digests(plan, folder)
            key = canonical_hash([dict(self._digests), request.top, self._block_examples])[:32]
            self._place = folder / "run" / "scores" / key
            self._place.mkdir(parents=True, exist_ok=True)
            told = [[self._read(block) is not None for block in self._blocks()]]
        dist.broadcast_object_list(told, src=0)
        self._is_found = cast("list[bool]", told[0])

    @property
    def are_missing(self) -> bool:
        return not all(self._is_found)

    def compute(self, rank: int, watch: RankMonitor, stop: StopRequest) -> bool:
        """Compute the missing blocks; return whether none is left. Collective."""
        plan, folder = self._plan, self._folder
        watch.at("reading its part of the model", 0)
        trainer = engine_runtime(plan).build_trainer(plan, folder, forward_only=True)
        scorer = cast(ScoringTrainer, trainer)
        held = trainer.parameter_shards()
        write_json(folder / "run" / "ranks" / f"rank-{rank:05d}.json", rank_record(held, rank))
        check_parameters(plan, rank, held, trainer.transposed)
        image_processor = build_image_processor(plan, folder, rank)
        blocks = list(zip(self._blocks(), self._is_found, strict=True))
        missing = [block for block, is_found in blocks if not is_found]
        total, done, began = sum(b.stop - b.start for b in missing), 0, time.monotonic()
        found = sum(is_found for _, is_found in blocks)
        if rank == 0 and found:
            print(f"score: {found} of {len(blocks)} blocks were computed before", flush=True)
        for block in missing:
            watch.at(f"scoring {block.name}", 0)
            examples = SubsetSequences(block.rows, np.arange(block.start, block.stop))
            batches = ValidationBatches(plan, examples, plan.ranks[rank].data, image_processor)
            values = scorer.token_scores(batches, self._request.top)
            if rank == 0:
                self._write(block, values)
            done += block.stop - block.start
            if rank == 0:
                seconds = time.monotonic() - began
                left = seconds / done * (total - done)
                print(
                    f"score: {done:,} of {total:,} examples in {seconds:,.0f} s"
                    + (f", about {left:,.0f} s left" if left else ""),
                    flush=True,
                )
            if block is not missing[-1] and stop.agreed(trainer.device):
                return False
        return True

    def publish(self) -> None:
        """Write the manifest and move the folder to its place, whole. Raises SW6272."""
        parts = {
            name: self._part(name)
            for name, rows in ((TRAIN, self._data.train), (VALIDATION, self._data.validation))
            if rows is not None
        }
        manifest = ScoreManifest(
            format=FORMAT,
            digests=self._digests,
            top=self._request.top,
            sequence_length=self._plan.training.sequence_length,
            sequences_per_example=self._each,
            parts=parts,
        )
        write_manifest(self._place, manifest)
        try:
            os.rename(self._place, self._request.output)
        except OSError as error:
            raise refusal(
                "SW6272",
                f"{self._request.output!r} cannot be written: {error.strerror or error}",
                f"The scores are in {str(self._place)!r}: move that folder yourself.",
            ) from None
        for name, part in parts.items():
            print(
                f"{'held-out' if name == VALIDATION else name:<9} loss {part.loss:.6f}, perplexity "
                f"{part.perplexity:,.4f}, {part.tokens:,} labels of {part.sequences:,} sequences",
                flush=True,
            )

    def _write(self, block: _BlockPlan, values: torch.Tensor) -> None:
        """Write a block. Raises SW6273 where a score is no number."""
        is_label = label_mask(self._plan, block.rows.read(np.arange(block.start, block.stop)))
        arrays = pack_block(is_label, values.numpy(), self._request.top)
        wrong = int((~np.isfinite(arrays["label_log_probabilities"])).sum())
        if wrong:
            raise refusal(
                "SW6273",
                f"the model gives {wrong} of {int(is_label.sum())} labels of {block.name} a "
                "log-probability that is not finite",
                "Use training.precision bf16 or fp32 in place of fp16, or other weights.",
            )
        write_block(self._place / block.file, arrays)

    def _part(self, name: str) -> PartManifest:
        own: list[tuple[Block, Arrays]] = []
        for block in self._blocks():
            if block.name.startswith(name):
                found = self._read(block)
                if found is None:
                    raise refusal(
                        "SW6270",
                        f"{str(self._place / block.file)!r} cannot be read back",
                        "Look at the disk, and score again: the other blocks are kept.",
                    )
                arrays, checksum = found
                own.append(
                    (
                        Block(
                            file=block.file,
                            start=block.start * self._each,
                            stop=block.stop * self._each,
                            tokens=len(arrays["places"]),
                            sha256=checksum,
                        ),
                        arrays,
                    )
                )
        return part_manifest(own, own[-1][0].stop if own else 0)

    def _read(self, block: _BlockPlan) -> tuple[Arrays, str] | None:
        found = read_block(self._place / block.file)
        if found is None:
            return None
        arrays, _ = found
        sequences = (block.stop - block.start) * self._each
        return found if len(arrays["offsets"]) == sequences + 1 else None

    def _blocks(self) -> Iterator[_BlockPlan]:
        for name, rows in ((TRAIN, self._data.train), (VALIDATION, self._data.validation)):
            for start in range(0, 0 if rows is None else len(rows), self._block_examples):
                assert rows is not None
                yield _BlockPlan(
                    name=f"{name}-{start // self._block_examples:05d}",
                    rows=rows,
                    start=start,
                    stop=min(start + self._block_examples, len(rows)),
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class _BlockPlan:
    """Name a block of examples [start, stop) of the training or validation data."""

    name: str
    rows: SequenceDataset
    start: int
    stop: int

    @property
    def file(self) -> str:
        return f"{self.name}.safetensors"

"""Score a compiled folder's data on its ranks, instead of training."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from torch import distributed as dist

from shardwright.data.data_preparation import MAX_UNPREPARED_BYTES, prepare
from shardwright.data.dataset import resolve
from shardwright.data.score_files import VALIDATION
from shardwright.diagnostics import refusal
from shardwright.engines.trainer_protocol import engine_runtime
from shardwright.monitor.rank_monitor import RankMonitor
from shardwright.monitor.run_files import write_json, write_status
from shardwright.parallel.micro_batches import build_image_processor
from shardwright.plan.folder_paths import SCORE_FILE
from shardwright.plan.plan import Plan
from shardwright.train.host_consistency import check_same_data_on_hosts
from shardwright.train.score_blocks import ScoreBlocks
from shardwright.train.training_session import check_parameters, open_attempt, rank_record
from shardwright.train.training_worker import StopRequest
from shardwright.utils.run_lease import Lease


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """Hold what SCORE_FILE says.

    output: the score file, an absolute path
    top, block_examples: as ScoreBlocks takes them
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
    blocks = ScoreBlocks(
        plan,
        folder,
        data,
        folder / "run" / "scores",
        top=request.top,
        block_examples=request.block_examples,
    )
    is_done = not blocks.are_missing or _compute(blocks, plan, folder, rank, watch, stop)
    if rank == 0 and is_done:
        _publish(blocks, request.output)
    dist.barrier()
    if rank == 0:
        write_status(folder, "done" if is_done else "preempted", attempt.number, step=0)
    if lease is not None:
        lease.release()


def _compute(
    blocks: ScoreBlocks, plan: Plan, folder: Path, rank: int, watch: RankMonitor, stop: StopRequest
) -> bool:
    """Compute the missing blocks; return whether none is left. Collective."""
    watch.at("reading its part of the model", 0)
    trainer = engine_runtime(plan).build_trainer(plan, folder, forward_only=True)
    held = trainer.parameter_shards()
    write_json(folder / "run" / "ranks" / f"rank-{rank:05d}.json", rank_record(held, rank))
    check_parameters(plan, rank, held, trainer.transposed)
    image_processor = build_image_processor(plan, folder, rank)
    for number, name in enumerate(blocks.compute(trainer, image_processor)):
        if number and stop.agreed(trainer.device):
            return False
        watch.at(f"scoring {name}", 0)
    return True


def _publish(blocks: ScoreBlocks, output: str) -> None:
    """Move the score file to its place, whole, and print its losses. Raises SW6272."""
    file = blocks.finish()
    try:
        os.rename(file.path, output)
    except OSError as error:
        raise refusal(
            "SW6272",
            f"{output!r} cannot be written: {error.strerror or error}",
            f"The scores are in {str(file.path)!r}: move that folder yourself.",
        ) from None
    for name, part in file.manifest.parts.items():
        print(
            f"{'held-out' if name == VALIDATION else name:<9} loss {part.loss:.6f}, perplexity "
            f"{part.perplexity:,.4f}, {part.tokens:,} labels of {part.sequences:,} sequences",
            flush=True,
        )

"""Each start of a run is an attempt with a number and a checkpoint to go on from. No torch at module level: `run`
begins one in the user's shell; where each node starts its ranks by itself, rank 0 does.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from shardwright.plan.plan import Plan
from shardwright.runtime.checkpoint_index import checkpoint_root, choose_checkpoint, set_aside, step_of, tell
from shardwright.runtime.journal import read_json, write_json


def begin_attempt(plan: Plan, folder: Path, checkpoint: Path | None, *, fresh: bool, ranks_live: bool = False) -> int:
    """Clears what the last attempt left and writes run/attempt.json; returns the attempt's number.

    ranks_live: this attempt's ranks write their logs already.
    """
    run = folder / "run"
    attempt = int(str(read_json(run / "attempt.json").get("attempt", 0))) + 1
    if fresh:
        set_aside(plan, folder, attempt)
    elif checkpoint is not None and checkpoint.parent == checkpoint_root(plan, folder).resolve():
        set_aside(plan, folder, attempt, newer_than=step_of(checkpoint))
    for stale in ("status.json", "stop", "heartbeat"):
        (run / stale).unlink(missing_ok=True)
    for leftovers in ("errors", "ranks"):
        shutil.rmtree(run / leftovers, ignore_errors=True)
    for log in () if ranks_live else (run / "logs").glob("rank-*.log"):
        log.unlink()
    write_json(run / "attempt.json", {"attempt": attempt, "resume": str(checkpoint) if checkpoint else None})
    return attempt


def begin_on_ranks(plan: Plan, folder: Path, rank: int, resume: str) -> tuple[int, str | None]:
    """(attempt, checkpoint), decided by rank 0 and told to all: a shared file could reach some ranks late.

    resume: as for `run`. Process groups exist. Raises Refusal on every rank.
    """
    from deepspeed import comm as dist

    from shardwright.diagnostics import Refusal

    told: list[tuple[int, str | None] | Refusal | None] = [None]
    if rank == 0:
        try:
            chosen = choose_checkpoint(plan, folder, resume)
            tell(chosen)
            checkpoint = chosen.path if chosen else None
            attempt = begin_attempt(plan, folder, checkpoint, fresh=resume == "never", ranks_live=True)
            told = [(attempt, str(checkpoint) if checkpoint else None)]
        except Refusal as refusal:
            told = [refusal]
    dist.broadcast_object_list(told, src=0)
    if isinstance(told[0], Refusal):
        raise told[0]
    assert told[0] is not None
    return told[0]

"""Each start of a run is an attempt with a number and a checkpoint to go on from. No torch at
module level: `run` begins one in the user's shell; where each node starts its ranks by itself, rank
0 does.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from shardwright.checkpoint.resume_checkpoint import (
    ResumePoint,
    checkpoint_root,
    choose_checkpoint,
    print_resume_notes,
)
from shardwright.checkpoint.run_history import (
    RunHistory,
    current_run_history,
    new_run_history,
    run_history_from_json,
)
from shardwright.checkpoint.step_folders import rejected_faster_layouts
from shardwright.monitor.run_files import AttemptRecord, read_attempt_record, write_attempt_record
from shardwright.plan.plan import Plan
from shardwright.train.lease_ownership import take
from shardwright.utils.json_records import copy_shared_fields
from shardwright.utils.run_lease import Lease


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """resume: the checkpoint that it goes on from, None at the start; step: what that closed. line:
    which run it is."""

    number: int
    resume: str | None
    step: int
    line: RunHistory


def begin_attempt(
    plan: Plan,
    folder: Path,
    chosen: ResumePoint | None,
    *,
    fresh: bool,
    keeps_rank_logs: bool = False,
    lease: str | None = None,
) -> Attempt:
    """Clears what the last attempt left and writes run/attempt.json.

    fresh: another run than the last one. keeps_rank_logs: this attempt's ranks write their logs
    already. lease: the token that rank 0 takes over.
    """
    run = folder / "run"
    line = (
        chosen.line
        if chosen
        else (None if fresh else current_run_history(folder)) or new_run_history()
    )
    attempt = Attempt(
        number=(read_attempt_record(folder).number or 0) + 1,
        resume=str(chosen.path) if chosen else None,
        step=chosen.step if chosen else 0,
        line=line,
    )
    if fresh or chosen is not None:
        rejected_faster_layouts(
            checkpoint_root(plan, folder), attempt.number, newer_than=attempt.step
        )
    for stale in ("status.json", "stop", "heartbeat"):
        (run / stale).unlink(missing_ok=True)
    for leftovers in ("errors", "ranks"):
        shutil.rmtree(run / leftovers, ignore_errors=True)
    for log in () if keeps_rank_logs else (run / "logs").glob("rank-*.log"):
        log.unlink()
    record = copy_shared_fields(
        AttemptRecord, attempt, steps=plan.training.steps, line=asdict(line), lease=lease
    )
    write_attempt_record(folder, record)
    return attempt


def read_attempt(folder: Path) -> Attempt:
    """What `run` has begun."""
    begun = read_attempt_record(folder)
    return Attempt(
        number=begun.number or 1,
        resume=begun.resume or None,
        step=begun.step or 0,
        line=run_history_from_json(begun.line) or new_run_history(),
    )


def begin_attempt_on_ranks(
    plan: Plan, folder: Path, rank: int, resume: str | None, lease: Lease | None
) -> Attempt:
    """Decided by rank 0 and told to all: a shared file could reach some ranks late.

    resume: as for `run`; None where `run` has begun the attempt. lease: rank 0's, taken here where
    it is not yet. Process groups exist. Raises Refusal on every rank.
    """
    from torch import distributed as dist

    from shardwright.diagnostics import Refusal

    broadcast: list[Attempt | Refusal | None] = [None]
    if rank == 0:
        try:
            if lease is not None and not lease.taken:
                take(lease, folder)
            broadcast = [_begin_attempt_on_rank_0(plan, folder, resume)]
        except Refusal as refusal:
            broadcast = [refusal]
    dist.broadcast_object_list(broadcast, src=0)
    if isinstance(broadcast[0], Refusal):
        raise broadcast[0]
    assert broadcast[0] is not None
    return broadcast[0]


def _begin_attempt_on_rank_0(plan: Plan, folder: Path, resume: str | None) -> Attempt:
    if resume is None:
        return read_attempt(folder)
    chosen = choose_checkpoint(plan, folder, resume)
    print_resume_notes(chosen)
    return begin_attempt(plan, folder, chosen, fresh=resume == "never", keeps_rank_logs=True)

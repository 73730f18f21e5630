"""Begin an attempt of a run: its number, the checkpoint that it resumes from, and the run's lease.

No torch at module level: `run` begins an attempt in the user's shell. Where each node starts its
ranks by itself, rank 0 does.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from shardwright.checkpoint.checkpoint_storage import move_newer_steps_aside
from shardwright.checkpoint.resume_checkpoint import (
    ResumePoint,
    checkpoint_root,
    choose_checkpoint,
    print_resume_notes,
)
from shardwright.checkpoint.run_attempts import keep_attempt, record_start
from shardwright.checkpoint.run_history import (
    RunHistory,
    current_run_history,
    new_run_history,
    run_history_from_json,
)
from shardwright.diagnostics import Refusal, refusal
from shardwright.monitor.run_files import AttemptRecord, read_attempt_record, write_attempt_record
from shardwright.monitor.skipped_batches import remove_skipped_batches, skipped_steps
from shardwright.plan.plan import Plan
from shardwright.utils.json_values import copy_shared_fields
from shardwright.utils.run_lease import (
    Lease,
    LeaseHeldError,
    LeaseOwner,
    current_process_owner,
    lease_owner,
    live_owner,
)

# A run's lease on its compiled folder and its checkpoint folder: no second run, however it is
# started and on whichever host, writes there.
#
# `run` takes the lease and rank 0 takes it over. Where nobody called `run` (launch.sh by hand, a
# scheduler), rank 0 takes it.

RUN, RANKS = "run", "ranks"
HANDOVER_TIMEOUT_SECONDS = 10.0
"""Bounds the wait for a shared file to reach another host."""


def new_run_lease(plan: Plan, folder: Path, role: str) -> Lease:
    """Return a lease that is not taken yet.

    `run` includes the checkpoint folder only where it exists: it may be on the ranks' hosts alone.
    """
    root = checkpoint_root(plan, folder)
    beside = [root / ".lease"] if role == RANKS or root.is_dir() else []
    return Lease([folder / "run" / "lease", *beside], current_process_owner(role, folder))


@contextlib.contextmanager
def hold_run_lease(plan: Plan, folder: Path, ended_ranks: str | None = None) -> Iterator[Lease]:
    """Hold the lease until rank 0 has taken it over. Raises Refusal.

    ended_ranks: token of a lease whose ranks are known to have ended
    """
    lease = new_run_lease(plan, folder, RUN)
    take(lease, folder, ended_ranks)
    try:
        yield lease
    finally:
        lease.release()


# A supervisor holds a lease of its own for as long as it lives, also between two attempts.

SUPERVISOR, SUPERVISOR_LEASE = "supervisor", "run/supervisor.lease"
SUPERVISOR_STOP = "run/supervisor.stop"
"""Asks the supervisor to end, as run/stop asks the ranks."""


@contextlib.contextmanager
def hold_supervisor_lease(folder: Path) -> Iterator[None]:
    """Hold the supervisor's lease of a compiled folder. Raises Refusal: SW6006 where another
    supervisor lives."""
    lease = Lease([folder / SUPERVISOR_LEASE], current_process_owner(SUPERVISOR, folder))
    take(lease, folder)
    try:
        yield
    finally:
        lease.release()


def supervisor_owner(folder: Path) -> LeaseOwner | None:
    """Return the supervisor of a compiled folder, if it lives."""
    return live_owner(folder / SUPERVISOR_LEASE)


def check_no_supervisor(folder: Path) -> None:
    """Raise Refusal, SW6006, where a supervisor of this folder lives."""
    if (owner := supervisor_owner(folder)) is not None:
        raise _other_run_refusal(folder, LeaseHeldError(folder / SUPERVISOR_LEASE, owner))


def take(lease: Lease, folder: Path, handed: str | None = None) -> None:
    """Take the lease. Raises Refusal: SW6006 where another run is alive, SW6209 without write
    access."""
    try:
        dead = lease.take(handed, say=lambda text: print(text, file=sys.stderr, flush=True))
    except LeaseHeldError as held:
        raise _other_run_refusal(folder, held) from None
    except OSError as error:
        raise refusal(
            "SW6209",
            f"{str(error.filename or folder)!r} cannot be written: {error.strerror or error}",
            "Make room or give permission there, then `run` again.",
        ) from None
    for owner in dict.fromkeys(dead):
        print(
            f"the run on {owner.place} died without cleaning up; its lock is taken over",
            file=sys.stderr,
            flush=True,
        )


def acquire_lease_on_rank_0(lease: Lease, folder: Path) -> bool:
    """Take the lease; return whether `run` has begun this attempt. Raises Refusal."""
    token: str | None = None
    end = time.monotonic() + HANDOVER_TIMEOUT_SECONDS
    while (owner := lease_owner(folder / "run" / "lease")) is not None and owner.role == RUN:
        if read_attempt_record(folder).lease == owner.token:
            token = owner.token
        if token is not None or time.monotonic() > end:
            break
        time.sleep(0.5)
    take(lease, folder, token)
    return token is not None


def check_no_other_run(plan: Plan, folder: Path, rank: int) -> None:
    """Raise Refusal, SW6006, where another launch of this folder trains on this machine.

    Checked on ranks of rank 0's node, before they look for rank 0. Ranks of other nodes have a
    launcher of their own, which may run on the same machine (two nodes of Slurm can).
    """
    if plan.ranks[rank].node != plan.ranks[0].node:
        return
    path = folder / "run" / "lease"
    owner = lease_owner(path)
    if owner is not None and owner.role == RANKS and owner.lives() and owner.parent != os.getppid():
        raise _other_run_refusal(folder, LeaseHeldError(path, owner))


def lease_lost(owner: LeaseOwner, folder: Path) -> Refusal:
    return refusal(
        "SW6216",
        f"another run ({owner.place}) has taken over {str(folder)!r}, because this run stopped "
        "renewing its lease",
        "Leave the folder to the other run, which `shardwright status` shows. This run stops and "
        "has written nothing since.",
    )


def _other_run_refusal(folder: Path, held: LeaseHeldError) -> Refusal:
    owner = held.owner
    if owner.role == SUPERVISOR:
        message = f"a supervisor of {str(folder)!r} is alive: {owner.place}"
    elif owner.folder == str(folder.resolve()):
        message = f"another run of {str(folder)!r} is alive: {owner.place}"
    else:
        message = (
            f"a run of {owner.folder!r} ({owner.place}) writes its checkpoints to "
            f"{str(held.path.parent)!r}"
        )
    help = "`shardwright status` shows it; `shardwright stop` ends it with a checkpoint."
    return refusal("SW6006", message, help)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """Describe one attempt of a run.

    resume: the checkpoint that it resumes from; None at the start
    step: the checkpoint's step
    line: the run's history
    skipped_steps: steps whose batches are left out
    """

    number: int
    resume: str | None
    step: int
    line: RunHistory
    skipped_steps: tuple[int, ...] = ()


def begin_attempt(
    plan: Plan,
    folder: Path,
    chosen: ResumePoint | None,
    *,
    fresh: bool,
    keeps_rank_logs: bool = False,
    lease: str | None = None,
    hosts: Sequence[str] = (),
) -> Attempt:
    """Move what the last attempt left into run/attempts and write run/attempt.json.

    fresh: a different run than the last one
    keeps_rank_logs: this attempt's ranks write their logs already
    lease: the token that rank 0 takes over
    hosts: those that it runs on, () where that is not known yet

    Raises OSError.
    """
    run = folder / "run"
    line = (
        chosen.line
        if chosen
        else (None if fresh else current_run_history(folder)) or new_run_history()
    )
    attempt = Attempt(
        number=keep_attempt(plan, folder, with_logs=not keeps_rank_logs),
        resume=str(chosen.path) if chosen else None,
        step=chosen.step if chosen else 0,
        line=line,
        skipped_steps=() if fresh else skipped_steps(folder),
    )
    if fresh:
        remove_skipped_batches(folder)
    if fresh or chosen is not None:
        move_newer_steps_aside(
            checkpoint_root(plan, folder), attempt.number, newer_than=attempt.step
        )
    for stale in ("stop", "heartbeat"):
        (run / stale).unlink(missing_ok=True)
    record = copy_shared_fields(
        AttemptRecord, attempt, steps=plan.training.steps, line=asdict(line), lease=lease
    )
    write_attempt_record(folder, record)
    record_start(plan, folder, attempt.number, attempt.resume, attempt.step, hosts)
    return attempt


def read_attempt(folder: Path) -> Attempt:
    """Return the attempt that `run` has begun."""
    begun = read_attempt_record(folder)
    return Attempt(
        number=begun.number or 1,
        resume=begun.resume or None,
        step=begun.step or 0,
        line=run_history_from_json(begun.line) or new_run_history(),
        skipped_steps=skipped_steps(folder),
    )


def begin_attempt_on_ranks(
    plan: Plan, folder: Path, rank: int, resume: str | None, lease: Lease | None
) -> Attempt:
    """Begin the attempt on rank 0 and broadcast it: a shared file could reach some ranks late.
    Collective.

    resume: as for `run`; None where `run` has begun the attempt
    lease: rank 0's, taken here where it is not yet

    Raises Refusal on every rank.
    """
    from torch import distributed as dist

    from shardwright.diagnostics import Refusal

    broadcast: list[Attempt | Refusal | None] = [None]
    if rank == 0:
        try:
            if lease is not None and not lease.taken:
                take(lease, folder)
            if resume is None:
                broadcast = [read_attempt(folder)]
            else:
                chosen = choose_checkpoint(plan, folder, resume)
                print_resume_notes(chosen)
                fresh = resume == "never"
                broadcast = [begin_attempt(plan, folder, chosen, fresh=fresh, keeps_rank_logs=True)]
        except Refusal as refusal:
            broadcast = [refusal]
    dist.broadcast_object_list(broadcast, src=0)
    if isinstance(broadcast[0], Refusal):
        raise broadcast[0]
    assert broadcast[0] is not None
    return broadcast[0]

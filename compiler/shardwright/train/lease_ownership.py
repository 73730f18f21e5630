"""A run's lease on its compiled folder and on where its checkpoints go: no second run, however it
is started and on whichever host, writes there. No torch here.

`run` takes it, rank 0 takes it over; where nobody called `run` (launch.sh by hand, a scheduler),
rank 0 takes it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from shardwright.checkpoint.resume_checkpoint import checkpoint_root
from shardwright.diagnostics import Refusal, refusal
from shardwright.monitor.run_files import read_attempt_record
from shardwright.plan.plan import Plan
from shardwright.utils.run_lease import (
    Lease,
    LeaseHeldError,
    LeaseOwner,
    current_process_owner,
    lease_owner,
)

RUN, RANKS = "run", "ranks"
HANDOVER_TIMEOUT_SECONDS = 10.0
"""A shared file can reach another host late."""


def new_run_lease(plan: Plan, folder: Path, role: str) -> Lease:
    """Not taken yet. `run` looks at the checkpoints' folder where it is there: it may be on the
    ranks' hosts only."""
    root = checkpoint_root(plan, folder)
    beside = [root / ".lease"] if role == RANKS or root.is_dir() else []
    return Lease([folder / "run" / "lease", *beside], current_process_owner(role, folder))


@contextlib.contextmanager
def hold_run_lease(plan: Plan, folder: Path) -> Iterator[Lease]:
    """Until rank 0 has taken it over. Raises Refusal."""
    lease = new_run_lease(plan, folder, RUN)
    take(lease, folder)
    try:
        yield lease
    finally:
        lease.release()


def take(lease: Lease, folder: Path, handed: str | None = None) -> None:
    """Raises Refusal: SW6006 where another run is alive, SW6209 where nothing can be written."""
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
            f"the run on {owner.place} ended without a word; what it held is taken over",
            file=sys.stderr,
            flush=True,
        )


def acquire_lease_on_rank_0(lease: Lease, folder: Path) -> bool:
    """Whether `run` has begun this attempt. Raises Refusal."""
    handed = _run_token(folder)
    take(lease, folder, handed)
    return handed is not None


def _run_token(folder: Path) -> str | None:
    """The token of the `run` whose attempt this is."""
    end = time.monotonic() + HANDOVER_TIMEOUT_SECONDS
    while (owner := lease_owner(folder / "run" / "lease")) is not None and owner.role == RUN:
        if read_attempt_record(folder).lease == owner.token:
            return owner.token
        if time.monotonic() > end:
            break
        time.sleep(0.5)
    return None


def check_no_other_run(plan: Plan, folder: Path, rank: int) -> None:
    """On a neighbour of rank 0, before it looks for its own: where another launch of this folder
    trains on this machine, what it finds is that one's. Ranks of other nodes have a launcher of
    their own, which may run on the same machine (two nodes of Slurm can). Raises Refusal:
    SW6006."""
    if plan.ranks[rank].node != plan.ranks[0].node:
        return
    path = folder / "run" / "lease"
    owner = lease_owner(path)
    if owner is not None and owner.role == RANKS and owner.lives() and owner.parent != os.getppid():
        raise _other_run_refusal(folder, LeaseHeldError(path, owner))


def lease_lost(owner: LeaseOwner, folder: Path) -> Refusal:
    return refusal(
        "SW6216",
        f"another run ({owner.place}) has taken over {str(folder)!r} while this one did not move",
        (
            "This one ends, and has written nothing since. `shardwright status` says how the other "
            "is doing."
        ),
    )


def _other_run_refusal(folder: Path, held: LeaseHeldError) -> Refusal:
    owner = held.owner
    if owner.folder == str(folder.resolve()):
        message = f"another run of {str(folder)!r} is alive: {owner.place}"
    else:
        message = (
            f"a run of {owner.folder!r} ({owner.place}) writes its checkpoints to "
            f"{str(held.path.parent)!r}"
        )
    help = (
        "`shardwright status` says how it is doing; `shardwright stop` ends it with a checkpoint."
    )
    return refusal("SW6006", message, help)

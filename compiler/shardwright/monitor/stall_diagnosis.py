"""No step for ten minutes: which rank do all the others wait for? No torch here."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import FrameType

_COLLECTIVES = (
    "torch/distributed/distributed_c10d.py",
    "deepspeed/comm/",
    "torch/distributed/_functional_collectives",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStack:
    """Where one rank's main thread is.

    current_collective: the collective that it is inside of, or None.
    counts: process group -> collectives that this rank has started in it.
    """

    step: int
    phase: str
    where: str
    current_collective: str | None
    counts: Mapping[str, int]


def thread_location(thread: int) -> tuple[str, str | None]:
    """(innermost file:line in function, the collective that the thread is inside of) of the thread
    with this ident."""
    frame: FrameType | None = sys._current_frames().get(thread)
    where, collective = "unknown", None
    if frame is not None:
        where = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
    while frame is not None:
        if (
            any(part in frame.f_code.co_filename for part in _COLLECTIVES)
            and frame.f_code.co_name != "wrapper"
        ):
            collective = frame.f_code.co_name
        frame = frame.f_back
    return where, collective


def suspect_ranks(stacks: Mapping[int, RankStack], ranks: Collection[int]) -> tuple[int, ...]:
    """The ranks that wait for nobody, () where all wait for each other. ranks: those that are
    connected.

    A rank whose threads do not even answer; else the one outside every collective; where several
    are (a GPU's kernels are waited for outside), those that are behind in a group and ahead in
    none.
    """
    silent = tuple(sorted(set(ranks) - set(stacks)))
    if silent:
        return silent
    outside = tuple(
        sorted(rank for rank, stack in stacks.items() if stack.current_collective is None)
    )
    if len(outside) == 1:
        return outside
    behind = {
        rank
        for rank, stack in stacks.items()
        if any(_is_ahead(other, stack) for other in stacks.values())
        and not any(_is_ahead(stack, o) for o in stacks.values())
    }
    return tuple(sorted(behind)) or outside


def _is_ahead(one: RankStack, other: RankStack) -> bool:
    """Whether `one` has started a collective that `other` has not."""
    shared = one.counts.keys() & other.counts.keys()
    return any(one.counts[name] > other.counts[name] for name in shared)


def stall_text(
    stacks: Mapping[int, RankStack],
    blamed: tuple[int, ...],
    hosts: Mapping[int, str],
    stall_seconds: float,
) -> str:
    """One line: since when, who, where."""
    since = f"no step for {stall_seconds:.0f} s: "
    if not blamed:
        one = next(iter(stacks.values()))
        return (
            f"{since}every rank waits inside a collective ({one.current_collective} on rank "
            f"{min(stacks)}), "
            "so none is to blame: look at the network, and at run/ranks/*.stack"
        )
    parts = []
    for rank in blamed[:4]:
        stack = stacks.get(rank)
        what = (
            f"is {stack.phase}, at {stack.where}"
            if stack
            else "does not answer (stopped, or stuck in the driver)"
        )
        parts.append(f"rank {rank} on {hosts.get(rank, '?')} {what}")
    verb = "waits for nobody and all wait for it" if len(blamed) == 1 else "wait for nobody"
    return f"{since}{'; '.join(parts)}: {verb}. Stacks: run/ranks/rank-*.stack"

"""Define the events that ranks print on the launcher's output, for whoever reads it.

Each event is one line, on any host, with or without a shared file system: a JSON object with its
`kind` and its class's fields.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any, ClassVar

from shardwright.utils.json_values import JsonObject

# No step for ten minutes: which rank do all the others wait for? No torch here.


COLLECTIVE_FILES = (
    "torch/distributed/distributed_c10d.py",
    "deepspeed/comm/",
    "torch/distributed/_functional_collectives",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStack:
    """Holds where one rank's main thread is.

    current_collective: the collective that it is inside of, or None. counts: process group ->
    collectives that this rank has started in it.
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
            any(part in frame.f_code.co_filename for part in COLLECTIVE_FILES)
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
    """Return whether `one` has started a collective that `other` has not."""
    shared = one.counts.keys() & other.counts.keys()
    return any(one.counts[name] > other.counts[name] for name in shared)


def stall_text(
    stacks: Mapping[int, RankStack],
    blamed: tuple[int, ...],
    hosts: Mapping[int, str],
    stall_seconds: float,
) -> str:
    """Describe a stall in one line: since when, which ranks, where."""
    since = f"no step for {stall_seconds:.0f} s: "
    if not blamed:
        one = next(iter(stacks.values()))
        return (
            f"{since}every rank waits inside a collective ({one.current_collective} on rank "
            f"{min(stacks)}), so no rank is the suspect: check the network, and see "
            "run/ranks/*.stack"
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
    verb = (
        "waits in no collective, and all other ranks wait for it"
        if len(blamed) == 1
        else "wait in no collective"
    )
    return f"{since}{'; '.join(parts)}: {verb}. Stacks: run/ranks/rank-*.stack"


EVENT_PREFIX = "@shardwright-event "
MAX_EVENT_BYTES = 4096
"""PIPE_BUF: ranks share a pipe, and a line shall arrive whole."""
MAX_CAUSE_CHARACTERS = 1000
"""Limits the length of a cause or a help text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailed:
    """A rank's own error. code, help, traceback: "" where rank 0 has heard the cause alone."""

    kind: ClassVar[str] = "failed"
    rank: int
    host: str | None = None
    stage: int | None = None
    code: str = ""
    cause: str = ""
    help: str = ""
    traceback: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLost:
    """A rank that went away without a word."""

    kind: ClassVar[str] = "lost"
    rank: int
    host: str | None = None
    stage: int | None = None
    pid: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStalled:
    """Reports that no step was finished for long. ranks: those that the others wait for, where
    known."""

    kind: ClassVar[str] = "stalled"
    ranks: tuple[int, ...] = ()
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunNotice:
    """Reports a notice, or an event of an unknown kind. The text "" is no notice."""

    kind: ClassVar[str] = "note"
    text: str


Event = RankFailed | RankLost | RunStalled | RunNotice


def event_object(event: Event) -> JsonObject:
    fields = asdict(event)
    if isinstance(event, RankLost) and event.pid is None:  # its own host would know
        del fields["pid"]
    return {"kind": event.kind, **fields}


def emit(descriptor: int, event: Event) -> None:
    """Writes `event` to the launcher's output; of a traceback the end is kept, as much as fits."""
    short = {
        name: v[:MAX_CAUSE_CHARACTERS] if isinstance(v, str) and name != "traceback" else v
        for name, v in event_object(event).items()
    }
    line = f"{EVENT_PREFIX}{json.dumps(short)}\n"
    while len(line) > MAX_EVENT_BYTES and short.get("traceback"):
        traceback = str(short["traceback"])
        short["traceback"] = traceback[len(traceback) // 8 + 1 :]
        line = f"{EVENT_PREFIX}{json.dumps(short)}\n"
    with contextlib.suppress(OSError):  # nobody reads any more: the caller is about to end as well
        os.write(descriptor, line.encode())


def read_events(lines: Iterable[str]) -> list[Event]:
    """Return the events in the order of arrival, as clocks of several hosts are not compared."""
    return [event for line in lines if (event := parse_event(line)) is not None]


def parse_event(line: str) -> Event | None:
    """Return the event of a line; None where the line holds none, or half of one."""
    _, marker, text = line.partition(EVENT_PREFIX)
    if not marker:
        return None
    try:
        document, _ = json.JSONDecoder().raw_decode(text)
    except ValueError:
        return None
    return _event(document) if isinstance(document, dict) else None


def _event(document: dict[str, Any]) -> Event | None:
    """Return the event of a document; None where it does not name its rank."""
    kind, rank, text = document.get("kind"), document.get("rank"), str(document.get("text") or "")
    if kind == RunStalled.kind:
        return RunStalled(ranks=tuple(document.get("ranks") or ()), text=text)
    if kind not in (RankFailed.kind, RankLost.kind):
        return RunNotice(text=text)
    if not isinstance(rank, int):
        return None
    host, stage = document.get("host"), document.get("stage")
    if kind == RankLost.kind:
        return RankLost(rank=rank, host=host, stage=stage, pid=document.get("pid"))
    texts = {name: str(document.get(name) or "") for name in ("code", "cause", "help", "traceback")}
    return RankFailed(rank=rank, host=host, stage=stage, **texts)


_SECONDARY_FAILURE_SIGNS = (
    *("Connection closed by peer", "Connection reset", "Broken pipe"),
    *("DistNetworkError", "DistStoreError", "gloo", "NCCL"),
)


def is_secondary_failure(cause: str) -> bool:
    """Return whether this error is what a rank reports when its peer went away, and so not the
    cause."""
    return any(sign in cause for sign in _SECONDARY_FAILURE_SIGNS)


def first_failure(events: Iterable[Event]) -> RankFailed | RankLost | None:
    """The earliest error of a rank's own, else the rank that went away first, else the first
    echo."""
    said = [e for e in events if isinstance(e, RankFailed | RankLost)]
    # A stable sort: the first of each kind stays in front.
    said.sort(
        key=lambda e: 1 if isinstance(e, RankLost) else 2 if is_secondary_failure(e.cause) else 0
    )
    return said[0] if said else None

"""What ranks say to whoever watches the launcher's output: one line each, on any host, shared file system or not.

Kinds: `failed` (a rank's own error), `lost` (a rank that went away without a word), `stalled`, `note`.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable

from shardwright.ir.json_value import JsonValue

EVENT = "@shardwright-event "
MOST_BYTES = 3900
"""Below PIPE_BUF: ranks share a pipe, and a line shall arrive whole."""

Event = dict[str, JsonValue]


def emit(descriptor: int, event: Event) -> None:
    """Writes `event` to the launcher's output; a traceback is cut from the front until it fits."""
    line = json.dumps(event)
    if len(line) > MOST_BYTES:
        spare = len(json.dumps(str(event.get("traceback", "")))) - (len(line) - MOST_BYTES)
        kept = str(event.get("traceback", ""))[-max(0, spare) // 2 or None :] if spare > 0 else ""
        line = json.dumps({**event, "traceback": kept, "cause": str(event.get("cause", ""))[:1000]})
    with contextlib.suppress(OSError):  # nobody reads any more: the caller is about to end as well
        os.write(descriptor, f"{EVENT}{line}\n".encode())


def read_events(lines: Iterable[str]) -> list[Event]:
    """In the order of arrival: clocks of several hosts are not compared."""
    found = []
    for line in lines:
        if (event := parse_event(line)) is not None:
            found.append(event)
    return found


def parse_event(line: str) -> Event | None:
    """None where the line holds none, or half of one."""
    _, marker, text = line.partition(EVENT)
    if not marker:
        return None
    try:
        event, _ = json.JSONDecoder().raw_decode(text)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


def is_echo(cause: str) -> bool:
    """Whether an error is what a rank says when its peer went away, and so not the cause."""
    signs = (
        "Connection closed by peer",
        "Connection reset",
        "Broken pipe",
        "DistNetworkError",
        "DistStoreError",
        "gloo",
        "NCCL",
    )
    return any(sign in cause for sign in signs)


def first_cause(events: Iterable[Event]) -> Event | None:
    """The earliest error of a rank's own, else the rank that went away first, else the first echo."""
    events = list(events)
    failed = [e for e in events if e.get("kind") == "failed"]
    own = [e for e in failed if not is_echo(str(e.get("cause")))]
    lost = [e for e in events if e.get("kind") == "lost"]
    return next(iter([*own, *lost, *failed]), None)

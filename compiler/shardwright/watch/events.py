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
MOST_BYTES = 4096
"""PIPE_BUF: ranks share a pipe, and a line shall arrive whole."""
MOST_CHARACTERS = 1000
"""Of a cause or a help text."""

Event = dict[str, JsonValue]


def emit(descriptor: int, event: Event) -> None:
    """Writes `event` to the launcher's output; of a traceback the end is kept, as much as fits."""
    short = {
        name: v[:MOST_CHARACTERS] if isinstance(v, str) and name != "traceback" else v for name, v in event.items()
    }
    line = f"{EVENT}{json.dumps(short)}\n"
    while len(line) > MOST_BYTES and short.get("traceback"):
        traceback = str(short["traceback"])
        short["traceback"] = traceback[len(traceback) // 8 + 1 :]
        line = f"{EVENT}{json.dumps(short)}\n"
    with contextlib.suppress(OSError):  # nobody reads any more: the caller is about to end as well
        os.write(descriptor, line.encode())


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

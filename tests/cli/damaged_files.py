"""Damage to the JSON files of a folder, by a seed, and the commands that read them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from shardwright.cli.main import main

KeyPath = tuple[str | int, ...]
Words = Sequence[str | Path]
Commands = Callable[[Path, random.Random], Sequence[Words]]
"""The commands to run on a folder."""
SECONDS_AT_MOST = 60
"""Bounds one command, on a machine that also does other work."""
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 7, 0.5, -0.5, 1e308, 5e-324, 2**31, 2**63, -(2**63), 10**400),
    *(float("nan"), float("inf"), float("-inf")),
    *("", "auto", "3", "nan", "inf", "x" * 5000, "字", "\ud800", "a\nb", "\x1b[31mred\x1b[0m"),
    *("\x1b]0;title\x07", "\x9b2J", "\u202e", "../../x", "/etc/passwd", "step-00000009"),
    *([], [1], ["\ud800"], [[]], [None], {}, {"a": 1}, {"\x1b[2J": "\ud800"}),
)
"""JSON as Python writes and reads it, NaN and lone surrogates among it."""
DEPTHS = (70, 900, 100_000)


def places(value: Any, path: KeyPath = ()) -> list[KeyPath]:
    items: Any = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    found: list[KeyPath] = [path] if path else []
    for key, below in items:
        found += places(below, (*path, key))
    return found


def damage_document(rng: random.Random, text: str) -> str:
    """Return a JSON document with one or two of its values, keys or types changed."""
    document = json.loads(text)
    for _ in range(rng.choice((1, 1, 1, 2))):
        where = rng.choice(places(document) or [()])
        if not where:
            return json.dumps(rng.choice(ODD))
        parent = document
        for key in where[:-1]:
            parent = parent[key]
        match rng.choice(("value", "value", "value", "drop", "rename", "add", "deep", "twice")):
            case "drop":
                del parent[where[-1]]
            case "rename" if isinstance(parent, dict):
                parent[rng.choice(("", "x", "\x1b[31m", "\ud800"))] = parent.pop(where[-1])
            case "add" if isinstance(parent, dict):
                parent[rng.choice(("extra", "\x1b[31m", "\ud800"))] = rng.choice(ODD)
            case "deep":
                parent[where[-1]] = "HERE"
                return json.dumps(document).replace('"HERE"', _deep(rng))
            case "twice" if isinstance(parent, dict):
                again = json.dumps({where[-1]: rng.choice(ODD)})[1:-1]
                key = json.dumps(where[-1]) + ": "
                return json.dumps(document).replace(key, f"{again}, {key}", 1)
            case _:
                parent[where[-1]] = rng.choice(ODD)
    return json.dumps(document)


def _deep(rng: random.Random) -> str:
    levels = rng.choice(DEPTHS)
    return rng.choice(("[" * levels + "]" * levels, '{"a":' * levels + "1" + "}" * levels))


def damage_lines(rng: random.Random, text: str) -> str:
    """Return a JSON Lines file with a line or two changed, added, doubled or moved."""
    lines = text.splitlines()
    for _ in range(rng.choice((1, 2, 4))):
        at = rng.randrange(len(lines))
        match rng.choice(("document", "document", "document", "text", "twice", "move", "every")):
            case "document":
                if _parsed(lines[at]) is not None:
                    lines[at] = damage_document(rng, lines[at])
            case "text":
                lines.insert(at, rng.choice(("", "text", "[1]", "{", "null", '"\\ud800"', "{}")))
            case "twice":
                lines.insert(at, lines[rng.randrange(len(lines))])
            case "move":
                lines.append(lines.pop(at))
            case _:  # one key of all lines
                rows = [row for line in lines if isinstance(row := _parsed(line), dict) and row]
                if rows:
                    key, value = rng.choice(list(rows[0])), rng.choice(ODD)
                    lines = [json.dumps({**row, key: value}) for row in rows]
    return "\n".join(lines) + rng.choice(("\n", "\n", ""))


def _parsed(line: str) -> Any:
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(line)
    return None


def damage_bytes(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data))
    piece = rng.choice(
        (
            b"",
            b"{",
            b"}",
            b'"',
            b"\\",
            b"\x00",
            b"\xff\xfe",
            b"\x1b[31m",
            b"null",
            b",",
            b"-",
            b"9e999",
        )
    )
    return rng.choice(
        (
            data[:at],
            b"",
            b"\xef\xbb\xbf" + data,
            data.decode("utf-8").encode("utf-16"),
            bytes(rng.randrange(256) for _ in range(200)),
            data[:at] + piece + data[at + rng.choice((0, 1, 5)) :],
        )
    )


def damage_file(rng: random.Random, path: Path) -> str:
    """Damage a file, whose text is UTF-8; return what was done."""
    data = path.read_bytes()
    kind = rng.choice(
        ("content",) * 14 + ("bytes",) * 4 + ("none", "folder", "pipe", "device", "link")
    )
    if kind == "content":
        damage = damage_lines if path.suffix == ".jsonl" else damage_document
        path.write_text(damage(rng, data.decode("utf-8")), encoding="utf-8", errors="surrogatepass")
        return kind
    path.unlink()
    match kind:
        case "bytes":
            path.write_bytes(damage_bytes(rng, data))
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/null")  # as safe to read as /dev/zero is not
        case "link":
            path.symlink_to(path.name)
    return kind


class _TooLong(BaseException):
    """Ends a command that nothing else would end."""


def _end(number: int, frame: FrameType | None) -> None:
    raise _TooLong("".join(traceback.format_stack(frame)))


def run_command(words: Words) -> tuple[int, str, str]:
    """Run a command in this process; return its exit code, stdout and stderr, as a terminal gets
    them."""
    buffers = [io.BytesIO(), io.BytesIO()]
    streams = [io.TextIOWrapper(each, encoding="utf-8", newline="") for each in buffers]
    before = signal.signal(signal.SIGALRM, _end)
    signal.alarm(SECONDS_AT_MOST)
    try:
        with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
            code = main([str(word) for word in words])
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    for stream in streams:
        stream.flush()
    out, err = (buffer.getvalue().decode("utf-8") for buffer in buffers)
    return code, out, err


def problems_of(words: Words) -> list[str]:
    """Run a command; return what no damaged file may bring about."""
    try:
        code, out, err = run_command(words)
    except _TooLong as error:
        return [f"no end within {SECONDS_AT_MOST} s: {str(error)[-3000:]}"]
    found = []
    if "our fault" in err:
        details = err.split("details are in ", 1)[1].split(";", 1)[0]
        found.append(f"our fault: {Path(details).read_text('utf-8')[-3000:]}")
        os.unlink(details)
    elif code not in (0, 1, 3) or "Traceback" in out + err:
        found.append(f"exit code {code}: {out[-1000:]}{err[-1000:]}")
    raw = {
        c for c in out + err if c != "\n" and (ord(c) < 32 or 127 <= ord(c) < 160 or c == "\u202e")
    }
    if raw:
        found.append(f"raw control characters {raw}: {out[-2000:]}{err[-1000:]}")
    if "--json" in words and out.strip():
        for line in out.splitlines():
            try:
                json.loads(line, parse_constant=_no_constant)
            except ValueError as error:
                found.append(f"--json wrote no JSON ({error}): {out[:1000]}")
    return found


def _no_constant(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def try_damages(folder: Path, name: str, commands: Commands, count: int, copy: Path) -> list[str]:
    """Damage a file of a folder's copy in `count` ways, and run commands on each; return a text for
    each that goes wrong."""
    found: list[str] = []
    for number in range(count):
        seed = f"{name} {number}"
        shutil.copytree(folder, copy)
        kind = damage_file(random.Random(seed), copy / name)
        for words in commands(copy, random.Random(seed)):
            line = " ".join(map(str, words))
            problems = problems_of(words)
            found += [f"seed {seed!r} ({kind}), {line}\n{problem}" for problem in problems]
        shutil.rmtree(copy)
    if found:
        print("\n\n".join(found), file=sys.stderr)
    return found

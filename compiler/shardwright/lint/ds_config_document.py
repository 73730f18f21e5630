"""Reads a ds_config file: its values, and the place of each.

DeepSpeed reads the file with Hjson (runtime/tensor_parallel/init_utils.py, load_ds_config):
comments, a trailing comma and unquoted words are allowed. The Trainer and Accelerate read it with
`json` (accelerate/utils/deepspeed.py).
"""

from __future__ import annotations

import errno
import json
import math
import operator
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

from shardwright.diagnostics import Diagnostic, KeyPath, Location, Refusal, Source, found
from shardwright.recipe.recipe_tree import (
    LineOffsets,
    MapNode,
    Node,
    ScalarNode,
    Span,
    json_tree,
    refuse_constant,
    walk_tree,
)
from shardwright.utils.file_io import is_nested_too_deeply, read_regular_file
from shardwright.utils.json_values import JsonObject, JsonValue

STDIN = "<stdin>"
MOST_BYTES = 512 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """Holds a ds_config.

    name: the file, as printed. uncommented: the text with comments and trailing commas blanked out,
    offset for offset. is_plain_json: JSON without Hjson's additions. keys, values: the place of
    each in `uncommented`; empty where Hjson leaves quotes out.
    """

    name: str
    text: str
    uncommented: str
    config: JsonObject
    is_plain_json: bool
    keys: Mapping[KeyPath, Span]
    values: Mapping[KeyPath, Span]
    source: Source


def read_ds_config_text(path: str) -> str:
    """Read a file, or standard input for "-". Raises Refusal with SW4001, SW4002, SW4003 or
    SW4009."""
    name = STDIN if path == "-" else path
    try:
        if path != "-":
            data = read_regular_file(path, MOST_BYTES)
        elif len(data := sys.stdin.buffer.read(MOST_BYTES + 1)) > MOST_BYTES:
            raise OSError(errno.EFBIG, "it is too large")
    except IsADirectoryError:
        help = "Name the file, such as ds_config.json inside it."
        raise _refused(name, "SW4002", f"{path} is a folder", help) from None
    except OSError as error:
        if error.errno == errno.EFBIG:
            message = f"{path} is larger than {MOST_BYTES // 1024} KiB"
            raise _refused(name, "SW4009", message, "Is it a ds_config.json?") from None
        message = f"{path} cannot be read: {error.strerror or error}"
        raise _refused(
            name, "SW4001", message, "Check the path and its rights; `-` is standard input."
        ) from None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        message = f"{path} is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}"
        raise _refused(name, "SW4003", message, "Save it as UTF-8.") from None


def parse_ds_config(name: str, text: str) -> Document:
    """Parse a ds_config. Raises Refusal with SW4004 to SW4007, or SW4009."""
    if not text.strip("\ufeff \t\r\n"):
        raise _refused(
            name, "SW4004", f"{name} is empty", 'Write at least {"train_batch_size": 8}.', text
        )
    uncommented, lines = _blank(text), LineOffsets(name, text)
    try:
        config, is_plain_json, placed = _parse(name, text, uncommented)
        if is_nested_too_deeply(config):
            raise RecursionError
        tree = list(walk_tree(json_tree(uncommented, lines))) if placed else []
    except RecursionError:
        raise _refused(
            name, "SW4009", f"{name} is nested too deeply", "Is it a ds_config.json?", text
        ) from None
    wrong = [error for path, _, node in tree for error in _node_errors(path, node, lines)]
    wrong.sort(key=operator.attrgetter("location.line", "location.column"))
    if not isinstance(config, Mapping):
        kind = "a list" if isinstance(config, list) else "a single value"
        first, help = Location(file=name, line=1, column=1), 'Write {"train_batch_size": ..., ...}.'
        wrong.append(found("SW4007", first, f"{name} holds {kind}, not an object", help))
    if wrong:
        raise Refusal(*wrong, source=Source(file=name, texts={name: text}))
    keys = {path: key for path, key, _ in tree if key is not None}
    key_locations = {path: key.location for path, key in keys.items()}
    # A section is shown by its key: its value may be many lines.
    locations = {path: node.location for path, _, node in tree}
    locations |= {
        path: key.location
        for path, key, node in tree
        if key is not None and not isinstance(node, ScalarNode)
    }
    return Document(
        name=name,
        text=text,
        uncommented=uncommented,
        config=cast(JsonObject, config),
        is_plain_json=is_plain_json,
        keys={path: key.span for path, key in keys.items()},
        values={path: node.span for path, _, node in tree},
        source=Source(
            file=name, locations=locations, key_locations=key_locations, texts={name: text}
        ),
    )


def _node_errors(path: KeyPath, node: Node, lines: LineOffsets) -> Iterator[Diagnostic]:
    """Find keys that stand twice, and numbers that no float holds."""
    if isinstance(node, MapNode):
        for key in node.duplicates:
            yield Diagnostic(
                code="SW4006",
                message=f"the key `{key.text}` stands here again",
                help="DeepSpeed refuses the file; keep one of the two.",
                key=(*path, key.text),
                location=key.location,
            )
    elif (
        isinstance(node, ScalarNode)
        and type(node.value) in (int, float)
        and not math.isfinite(float(node.text[:400]))
    ):
        message = f"{node.text} is not a finite number"
        yield _syntax(lines, node.span[0], message, node.span[1], "Write a finite number.")


def _parse(name: str, text: str, uncommented: str) -> tuple[JsonValue, bool, bool]:
    """Return (value, is plain JSON, has positions)."""
    try:
        return json.loads(text, parse_constant=refuse_constant), True, True
    except ValueError:
        pass
    import hjson

    try:
        value = cast(JsonValue, hjson.loads(text.removeprefix("\ufeff")))
    except (ValueError, OverflowError):
        raise Refusal(
            _not_json(name, text, uncommented), source=Source(file=name, texts={name: text})
        ) from None
    try:
        return value, False, json.loads(uncommented) == value
    except ValueError:
        return value, False, False


def _not_json(name: str, text: str, uncommented: str) -> Diagnostic:
    lines = LineOffsets(name, text)
    try:
        json.loads(uncommented, parse_constant=refuse_constant)
    except json.JSONDecodeError as error:
        start = min(error.pos, len(text))
        if error.msg.startswith("Expecting") and "delimiter" in error.msg:
            # Found at the next token; the comma or colon is missing after the one before it.
            start = max(0, len(uncommented[:start].rstrip()) - 1)
        word = re.compile(r"\w*").match(uncommented, start)
        found = word[0] if word else ""
        if found in _PYTHON:
            help = f"JSON writes {_PYTHON[found]}."
            return _syntax(lines, start, f"not JSON: {found} is Python", start + len(found), help)
        return _syntax(lines, start, f"not JSON: {error.msg[0].lower()}{error.msg[1:]}")
    except ValueError as error:
        start = uncommented.find(str(error))
        if start >= 0:
            end, finite = start + len(str(error)), "Write a finite number."
            return _syntax(lines, start, f"not JSON: {error} is no number of JSON", end, finite)
    return _syntax(lines, 0, "not JSON")


_PYTHON: dict[str, str] = {"True": "true", "False": "false", "None": "null"}


def _syntax(
    lines: LineOffsets,
    start: int,
    message: str,
    end: int | None = None,
    help: str = "Look for a missing comma, quote or bracket here and just before.",
) -> Diagnostic:
    return found("SW4005", lines.at(start, end or start + 1), message, help)


_COMMENT = re.compile(r'("(?:[^"\\\n]|\\.)*")|(#[^\n]*|//[^\n]*|/\*.*?\*/)', re.DOTALL)
_LAST_COMMA = re.compile(r'("(?:[^"\\\n]|\\.)*")|,(?=\s*[}\]])')


def _blank(text: str) -> str:
    """Replace comments and trailing commas by spaces, which keeps offsets and lines."""

    def spaces(match: re.Match[str]) -> str:
        return match[1] or re.sub(r"[^\r\n]", " ", match[0])

    return _LAST_COMMA.sub(spaces, _COMMENT.sub(spaces, text.replace("\ufeff", " ")))


def _refused(name: str, code: str, message: str, help: str, text: str | None = None) -> Refusal:
    texts = {} if text is None else {name: text}
    error = found(code, Location(file=name, line=0, column=0), message, help)
    return Refusal(error, source=Source(file=name, texts=texts))

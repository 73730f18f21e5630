"""Defines the tree of a text, each value with its place, and the JSON reader that recipes and
ds_config files share.

YAML readers fail on some JSON: tabs, \\u pairs, keys of more than 1,024 characters. So the standard
library validates JSON, and this reader finds the places in it.
"""

from __future__ import annotations

import bisect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardwright.diagnostics import KeyPath, Location
from shardwright.utils.json_values import JsonScalar, JsonValue

LINE_BREAK = re.compile(r"\r\n|\r|\n")
Span = tuple[int, int]
"""Holds offsets into the text: [start, end)."""


class LineOffsets:
    """Converts offsets to places. text: the whole text as it will be shown. offset: where the part
    that is read begins."""

    def __init__(self, file: str, text: str, offset: int = 0) -> None:
        self.file = file
        self._offset = offset
        self._starts = [0, *(match.end() for match in LINE_BREAK.finditer(text))]
        self._ends = [*(match.start() for match in LINE_BREAK.finditer(text)), len(text)]

    def at(self, start: int, end: int) -> Location:
        """Return the place of text[start:end], cut at the end of its first line."""
        start, end = start + self._offset, end + self._offset
        line = bisect.bisect_right(self._starts, start) - 1
        length = max(1, min(end, self._ends[line]) - start)
        return Location(
            file=self.file, line=line + 1, column=start - self._starts[line] + 1, length=length
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalarNode:
    """Holds a scalar. text: as written, without quotes and escapes; the name where it is a key."""

    value: JsonScalar
    text: str
    location: Location
    span: Span


@dataclass(frozen=True, slots=True, kw_only=True)
class ListNode:
    items: tuple[Node, ...]
    location: Location
    span: Span


class MapEntry(NamedTuple):
    key: ScalarNode
    node: Node


@dataclass(frozen=True, slots=True, kw_only=True)
class MapNode:
    """Holds a mapping. duplicates: repeated keys, whose values are dropped."""

    entries: Mapping[str, MapEntry]
    location: Location
    span: Span
    duplicates: tuple[ScalarNode, ...] = ()


Node = ScalarNode | ListNode | MapNode


def map_node(pairs: Sequence[tuple[ScalarNode, Node]], location: Location, span: Span) -> MapNode:
    """Build a mapping in which the first of several equal keys counts."""
    entries: dict[str, MapEntry] = {}
    for key, node in pairs:
        entries.setdefault(key.text, MapEntry(key, node))
    duplicates = tuple(key for key, _ in pairs if entries[key.text].key is not key)
    return MapNode(entries=entries, location=location, span=span, duplicates=duplicates)


def node_value(node: Node) -> JsonValue:
    """Return the values without their places. The readers bound the depth."""
    if isinstance(node, ScalarNode):
        return node.value
    if isinstance(node, ListNode):
        return [node_value(item) for item in node.items]
    return {name: node_value(entry.node) for name, entry in node.entries.items()}


def walk_tree(
    node: Node, path: KeyPath = (), key: ScalarNode | None = None
) -> Iterator[tuple[KeyPath, ScalarNode | None, Node]]:
    """Yield (key path, key, value) of everything in the tree, the root included."""
    yield path, key, node
    if isinstance(node, MapNode):
        for name, entry in node.entries.items():
            yield from walk_tree(entry.node, (*path, name), entry.key)
    elif isinstance(node, ListNode):
        for index, item in enumerate(node.items):
            yield from walk_tree(item, (*path, index))


_TOKEN = re.compile(r'[ \t\r\n,:]*(?:([{\[])|([}\]])|("(?:[^"\\]|\\.)*")|([^\s{}\[\],:"]+))')


def refuse_constant(word: str) -> None:
    """Refuse NaN and Infinity, as `parse_constant` of json.loads. Raises ValueError."""
    raise ValueError(word)


def json_tree(text: str, lines: LineOffsets) -> Node:
    """Return the tree of a text that is valid JSON. Nesting costs no recursion."""
    nodes: list[Node] = []
    open_collections: list[tuple[int, list[Node]]] = []
    for match in _TOKEN.finditer(text):
        opening, closing, string, word = match.groups()
        start, end = match.start(match.lastindex or 0), match.end()
        if opening:
            open_collections.append((start, nodes))
            nodes = []
            continue
        node: Node
        if closing:
            start, outer = open_collections.pop()
            place, span = lines.at(start, end), (start, end)
            if closing == "}":
                keys = [key for key in nodes[::2] if isinstance(key, ScalarNode)]
                node = map_node(list(zip(keys, nodes[1::2], strict=True)), place, span)
            else:
                node = ListNode(items=tuple(nodes), location=place, span=span)
            nodes = outer
        else:
            shown = json.loads(string) if string else word
            node = ScalarNode(
                value=shown if string else yaml_scalar_value(word),
                text=shown,
                location=lines.at(start, end),
                span=(start, end),
            )
        nodes.append(node)
    return nodes[0]


# Plain scalars by the core schema of YAML 1.2 (section 10.3.2).

_WORDS: Mapping[str, JsonScalar] = {
    **dict.fromkeys(("null", "Null", "NULL", "~", "")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_INTEGER = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")


def yaml_scalar_value(text: str) -> JsonScalar:
    """Return the value of an unquoted scalar. Infinity and NaN come back as such, and a number
    beyond 2^53 for any integer that is."""
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        sign, base = (-1 if text[0] == "-" else 1), {"0o": 8, "0x": 16}.get(text[:2], 10)
        # int() refuses thousands of digits; 40 are beyond 2^53 however they go on.
        return sign * int(text.lstrip("+-0ox")[:40] or "0", base)
    if _FLOAT.fullmatch(text):
        return float(text)
    return float(text.replace(".", "")) if _NOT_FINITE.fullmatch(text) else text

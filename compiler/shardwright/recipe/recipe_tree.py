"""Text -> Node tree, by one of two readers. Everything wrong that lets the reading go on is
collected, not raised.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)
from ruamel.yaml.reader import ReaderError

from shardwright.diagnostics import Diagnostic, KeyPath, Location, found
from shardwright.recipe.json_parser import LineOffsets, ParseError, ParseEvent, is_json, json_events
from shardwright.utils.json_values import JsonScalar, JsonValue

# A recipe before it is checked: values with the place they were read from.


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalarNode:
    value: JsonScalar
    location: Location
    size: int = 1
    depth: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ListNode:
    items: tuple[Node, ...]
    location: Location
    size: int
    depth: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MapEntry:
    key: str
    key_location: Location
    node: Node


@dataclass(frozen=True, slots=True, kw_only=True)
class MapNode:
    """size: nodes in the tree; depth: levels of it. Aliases count as often as they are used."""

    entries: tuple[MapEntry, ...]
    location: Location
    size: int
    depth: int

    def get(self, key: str) -> MapEntry | None:
        return next((entry for entry in self.entries if entry.key == key), None)


Node = ScalarNode | ListNode | MapNode


def map_node(entries: tuple[MapEntry, ...], location: Location) -> MapNode:
    size = 1 + sum(entry.node.size for entry in entries)
    depth = 1 + max((entry.node.depth for entry in entries), default=0)
    return MapNode(entries=entries, location=location, size=size, depth=depth)


def list_node(items: tuple[Node, ...], location: Location) -> ListNode:
    size, depth = (
        1 + sum(item.size for item in items),
        1 + max((item.depth for item in items), default=0),
    )
    return ListNode(items=items, location=location, size=size, depth=depth)


def node_value(node: Node) -> JsonValue:
    """Without the places. Depth is bounded by the reader, so recursion is safe."""
    if isinstance(node, ScalarNode):
        return node.value
    if isinstance(node, ListNode):
        return [node_value(item) for item in node.items]
    return {entry.key: node_value(entry.node) for entry in node.entries}


def node_locations(
    node: Node, path: KeyPath = ()
) -> Iterator[tuple[KeyPath, Location, Location | None]]:
    """(key path, place of the value, place of the key) of everything in the tree."""
    if path == ():
        yield (), node.location, None
    if isinstance(node, MapNode):
        for entry in node.entries:
            yield (*path, entry.key), entry.node.location, entry.key_location
            yield from node_locations(entry.node, (*path, entry.key))
    elif isinstance(node, ListNode):
        for index, item in enumerate(node.items):
            yield (*path, index), item.location, None
            yield from node_locations(item, (*path, index))


# Plain scalars by the core schema of YAML 1.2 (section 10.3.2), and what they must not be.


LARGEST_INTEGER = 2**53
INTEGER_HELP = "Write an integer of at most 9007199254740992, such as 1e12."

_NULL = re.compile(r"null|Null|NULL|~|")
_TRUE = re.compile(r"true|True|TRUE")
_FALSE = re.compile(r"false|False|FALSE")
_DECIMAL = re.compile(r"[-+]?[0-9]+")
_OCTAL = re.compile(r"0o[0-7]+")
_HEXADECIMAL = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")


def yaml_scalar_value(text: str) -> JsonScalar:
    """The value of an unquoted scalar; infinity and NaN come back as such, and integers of any
    size."""
    if _NULL.fullmatch(text):
        return None
    if _TRUE.fullmatch(text):
        return True
    if _FALSE.fullmatch(text):
        return False
    if _OCTAL.fullmatch(text) or _HEXADECIMAL.fullmatch(text):
        return _integer(text[2:], 8 if text[1] == "o" else 16)
    if _DECIMAL.fullmatch(text):
        return _integer(text, 10)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _NOT_FINITE.fullmatch(text):
        return float(text.replace(".", ""))
    return text


def _integer(digits: str, base: int) -> int:
    # int() refuses thousands of digits; anything this long is beyond 2^53 however it ends.
    significant = digits.lstrip("+-").lstrip("0")
    value = int(significant[:40] or "0", base)
    return -value if digits.startswith("-") else value


def scalar_errors(value: JsonScalar, text: str, location: Location) -> Iterator[Diagnostic]:
    """Numbers that JSON cannot hold, and halves of a surrogate pair."""
    shown = text if len(text) <= 40 else f"{text[:37]}..."
    if isinstance(value, float) and not math.isfinite(value):
        help = "Write a finite number; a key that should have its default is left out."
        yield found("SW1013", location, f"{shown} is not a finite number", help)
    elif isinstance(value, int) and abs(value) > LARGEST_INTEGER:
        message = f"the integer {shown} is beyond 2^53, where JSON readers no longer agree"
        yield found("SW1014", location, message, INTEGER_HELP)
    elif isinstance(value, str) and any("\ud800" <= c <= "\udfff" for c in value):
        message = "this text holds half of a surrogate pair, which is no character"
        yield found(
            "SW1016", location, message, "Write the character itself, or both halves of its pair."
        )


# YAML 1.2 -> events, by ruamel.yaml's parser; nothing of its object construction is used.


_HINTS: dict[str, str] = {
    "found character '\\t' that cannot start any token": (
        "Indent with spaces; YAML does not allow tabs there."
    ),
    "mapping values are not allowed here": (
        "A value that holds `: ` needs quotes; check the indentation of this line."
    ),
    "could not find expected ':'": "Every key needs a colon and a space after it.",
    "found unexpected end of stream": "A quote or bracket is opened and never closed.",
}
_DEFAULT_HINT = "Check quotes, brackets and indentation at this place and just before it."


def yaml_events(text: str) -> Iterator[ParseEvent]:
    """Raises ParseError."""
    try:
        for event in YAML(typ="safe", pure=True).parse(text):
            start, end = event.start_mark.index, event.end_mark.index
            anchor, tag = getattr(event, "anchor", None), getattr(event, "tag", None)
            if isinstance(event, ScalarEvent):
                plain = not event.style
                yield ParseEvent(
                    kind="scalar",
                    start=start,
                    end=end,
                    text=event.value,
                    plain=plain,
                    anchor=anchor,
                    tag=tag,
                )
            elif isinstance(event, MappingStartEvent | SequenceStartEvent):
                kind: Literal["map", "list"] = (
                    "map" if isinstance(event, MappingStartEvent) else "list"
                )
                yield ParseEvent(
                    kind=kind,
                    start=start,
                    end=end,
                    flow=bool(event.flow_style),
                    anchor=anchor,
                    tag=tag,
                )
            elif isinstance(event, MappingEndEvent | SequenceEndEvent):
                yield ParseEvent(kind="end", start=start, end=end)
            elif isinstance(event, AliasEvent):
                yield ParseEvent(kind="alias", start=start, end=end, text=str(event.anchor))
            elif isinstance(event, DocumentStartEvent):
                if event.version not in (None, (1, 2)):
                    raise ParseError(
                        (
                            f"the file asks for YAML {'.'.join(map(str, event.version))}; recipes "
                            "are YAML 1.2"
                        ),
                        start,
                        "Remove the %YAML line.",
                    )
                yield ParseEvent(kind="document", start=start, end=end)
    except ReaderError as error:
        raise ParseError(
            f"character U+{_code_point(error.character):04X} is not allowed in YAML",
            int(error.position or 0),
            "Remove it, or write it as an escape inside double quotes.",
        ) from None
    except MarkedYAMLError as error:
        problem = " ".join(str(error.problem or error.context or "it cannot be read").split())
        # An unclosed quote is found at the end of the text, and is to be mended where it was
        # opened.
        unclosed = (
            problem.startswith("found unexpected end of stream") and error.context_mark is not None
        )
        mark = error.context_mark if unclosed else error.problem_mark or error.context_mark
        hint = next(
            (hint for start, hint in _HINTS.items() if problem.startswith(start)), _DEFAULT_HINT
        )
        raise ParseError(f"not valid YAML: {problem}", mark.index if mark else 0, hint) from None
    except (YAMLError, ValueError, IndexError, OverflowError, AssertionError) as error:
        # ruamel.yaml raises these, without a place, for some escapes and directives.
        raise ParseError(
            f"not valid YAML: {' '.join(str(error).split()) or type(error).__name__}",
            0,
            _DEFAULT_HINT,
        ) from None


def _code_point(character: object) -> int:
    return character if isinstance(character, int) else ord(str(character)[:1] or "\0")


MAX_RECIPE_DEPTH = 48
MAX_RECIPE_NODES = 20_000
MAX_RECIPE_BYTES = 512 * 1024


@dataclass(slots=True)
class _OpenCollection:
    """A mapping or list whose end has not come yet."""

    event: ParseEvent
    place: Location
    key_place: Location | None
    items: list[Node] = field(default_factory=list)
    entries: dict[str, MapEntry] = field(default_factory=dict)
    key: str | None = None
    key_event: ParseEvent | None = None


class _ParseAborted(Exception):
    """Reading cannot go on; the cause is among the errors."""


def parse_recipe_text(text: str, lines: LineOffsets) -> tuple[Node | None, tuple[Diagnostic, ...]]:
    """The tree (None where the text has none) and everything wrong with it."""
    builder = _Builder(text, lines)
    try:
        builder.read(json_events(text) if is_json(text) else yaml_events(text))
    except ParseError as problem:
        place = lines.at(min(problem.start, len(text)), min(problem.start, len(text)) + 1)
        return None, (*builder.errors, found(problem.code, place, problem.message, problem.help))
    except _ParseAborted:
        return None, tuple(builder.errors)
    return builder.root, tuple(builder.errors)


class _Builder:
    def __init__(self, text: str, lines: LineOffsets) -> None:
        self.text, self.lines = text, lines
        self.root: Node | None = None
        self.errors: list[Diagnostic] = []
        self.stack: list[_OpenCollection] = []
        self.anchors: dict[str, Node] = {}
        self.nodes = 0

    def read(self, events: Iterator[ParseEvent]) -> None:
        documents = 0
        for event in events:
            place = self.lines.at(event.start, event.end)
            if event.kind == "document":
                documents += 1
                if documents > 1:
                    self.stop(
                        "SW1009",
                        "a second YAML document begins here; a recipe is one",
                        place,
                        "Remove `---`.",
                    )
                continue
            if event.tag is not None:
                shown = event.tag.replace("tag:yaml.org,2002:", "!!")
                self.error(
                    "SW1008",
                    f"the tag {shown} is not allowed",
                    place,
                    "Remove it: quotes make text of a number.",
                )
            if event.kind == "end":
                self.close(event)
            elif self.expects_key():
                self.open_key(event, place)
            elif event.kind in ("map", "list"):
                if len(self.stack) >= MAX_RECIPE_DEPTH:
                    self.too_large(f"is nested more than {MAX_RECIPE_DEPTH} levels deep", place)
                self.stack.append(
                    _OpenCollection(event=event, place=place, key_place=self.key_place())
                )
            elif event.kind == "alias":
                self.alias(event, place)
            else:
                self.scalar(event, place)

    def expects_key(self) -> bool:
        return (
            bool(self.stack) and self.stack[-1].event.kind == "map" and self.stack[-1].key is None
        )

    def key_place(self) -> Location | None:
        event = self.stack[-1].key_event if self.stack else None
        return None if event is None else self.lines.at(event.start, event.end)

    def open_key(self, event: ParseEvent, place: Location) -> None:
        top = self.stack[-1]
        if event.kind != "scalar":
            self.stop(
                "SW1015", "a key must be plain text", place, "Write each key as `name: value`."
            )
        if event.plain and event.text == "<<":
            self.error(
                "SW1007",
                "merge keys (`<<`) are not part of YAML 1.2",
                place,
                "Use `extends`, or write the keys out.",
            )
        self.errors.extend(scalar_errors(event.text, event.text, place))
        if event.text in top.entries:
            first = top.entries[event.text].key_location.line
            self.error(
                "SW1006",
                f"the key `{event.text}` stands here again; it is on line {first} already",
                place,
                "Keep one of the two.",
            )
        top.key, top.key_event = event.text, event

    def scalar(self, event: ParseEvent, place: Location) -> None:
        value = yaml_scalar_value(event.text) if event.plain else event.text
        if event.start == event.end:  # `key:` without a value: show the key
            place = self.key_place() or place
        self.errors.extend(scalar_errors(value, event.text, place))
        self.add(ScalarNode(value=value, location=place), event.anchor, place)

    def alias(self, event: ParseEvent, place: Location) -> None:
        node = self.anchors.get(event.text)
        if node is None:
            self.stop(
                "SW1010",
                f"there is no finished anchor &{event.text} before this alias",
                place,
                "Write it out.",
            )
        elif len(self.stack) + node.depth > MAX_RECIPE_DEPTH:
            self.too_large(f"is nested more than {MAX_RECIPE_DEPTH} levels deep", place)
        else:
            self.add(node, None, place)

    def close(self, event: ParseEvent) -> None:
        top = self.stack.pop()
        # A block has no bracket to point at: its key is what the reader looks for.
        place = (
            self.lines.at(top.event.start, event.end)
            if top.event.flow
            else top.key_place or top.place
        )
        node: MapNode | ListNode
        if top.event.kind == "map":
            node = map_node(tuple(top.entries.values()), place)
        else:
            node = list_node(tuple(top.items), place)
        self.nodes -= node.size - 1  # counted while they were added
        self.add(node, top.event.anchor, place)

    def add(self, node: Node, anchor: str | None, place: Location) -> None:
        self.nodes += node.size
        if self.nodes > MAX_RECIPE_NODES:
            self.too_large(f"has more than {MAX_RECIPE_NODES} values, aliases included", place)
        if anchor is not None:
            self.anchors[anchor] = node
        if not self.stack:
            self.root = node
            return
        top = self.stack[-1]
        if top.event.kind == "list":
            top.items.append(node)
            return
        assert top.key is not None and top.key_event is not None
        key_place = self.lines.at(top.key_event.start, top.key_event.end)
        top.entries.setdefault(top.key, MapEntry(key=top.key, key_location=key_place, node=node))
        top.key = top.key_event = None

    def error(self, code: str, message: str, place: Location, help: str) -> None:
        self.errors.append(found(code, place, message, help))

    def stop(self, code: str, message: str, place: Location, help: str) -> None:
        self.error(code, message, place, help)
        raise _ParseAborted

    def too_large(self, what: str, place: Location) -> None:
        self.stop("SW1011", f"the recipe {what}", place, "Make it smaller.")

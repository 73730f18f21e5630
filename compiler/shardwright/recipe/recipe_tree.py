"""Text -> Node tree, by one of two readers. Everything wrong that lets the reading go on is
collected, not raised."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from shardwright.diagnostics import Diagnostic, Location, found
from shardwright.recipe.json_parser import is_json, json_events
from shardwright.recipe.parse_events import LineOffsets, ParseError, ParseEvent
from shardwright.recipe.recipe_nodes import (
    ListNode,
    MapEntry,
    MapNode,
    Node,
    ScalarNode,
    list_node,
    map_node,
)
from shardwright.recipe.yaml_parser import yaml_events
from shardwright.recipe.yaml_scalar import scalar_errors, yaml_scalar_value

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

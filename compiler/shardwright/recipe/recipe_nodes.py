"""A recipe before it is checked: values with the place they were read from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardwright.diagnostics import KeyPath, Location
from shardwright.utils.json_types import JsonScalar, JsonValue


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

"""Records are read back strictly, and every refusal names its place."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import pytest

from shardwright.utils.json_records import RecordError, read_record
from shardwright.utils.json_values import JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    name: str
    sizes: tuple[int, ...] = ()
    children: tuple[Leaf, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    leaf: Leaf
    rate: float
    pair: tuple[int, str]
    word: Literal["a", "b"] = "a"
    either: str | Leaf | None = None
    flag: bool = False
    table: Mapping[str, float] = field(default_factory=dict)
    free: JsonObject = field(default_factory=dict)


WHOLE = {
    "leaf": {
        "name": "x",
        "sizes": [1, 2],
        "children": [{"name": "y", "sizes": [], "children": []}],
    },
    "rate": 2,
    "pair": [1, "one"],
    "word": "b",
    "either": {"name": "z"},
    "flag": True,
    "table": {"bf16": 1},
    "free": {"any": [1, {"thing": None}]},
}


def test_there_and_back() -> None:
    tree = read_record(Tree, WHOLE)
    assert tree.leaf.children[0].name == "y" and tree.leaf.sizes == (1, 2)
    assert type(tree.rate) is float and type(tree.table["bf16"]) is float
    assert isinstance(tree.either, Leaf) and tree.free == {"any": [1, {"thing": None}]}
    assert read_record(Tree, dataclasses.asdict(tree)) == tree


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"more": 1}, "it has a key 'more' of which Tree knows nothing"),
        ({"leaf": {"name": "x", "more": 1}}, "leaf has a key 'more' of which Leaf knows nothing"),
        ({"leaf": {}}, "leaf lacks name"),
        ({"leaf": None}, "leaf is not an object"),
        ({"leaf": {"name": "x", "children": [{"name": 1}]}}, "leaf.children.name is 1, not a text"),
        ({"leaf": {"name": "x", "sizes": [1, True]}}, "leaf.sizes is True, not a whole number"),
        ({"leaf": {"name": "x", "sizes": "12"}}, "leaf.sizes is '12', not a list"),
        ({"rate": "2"}, "rate is '2', not a number"),
        ({"rate": 10**400}, "rate is 1"),
        ({"pair": [1]}, "pair has 1 entries, not 2"),
        ({"word": "c"}, "word is 'c', not one of a, b"),
        ({"either": 3}, "either is not an object"),
        ({"flag": 0}, "flag is 0, not true or false"),
        ({"table": {"bf16": None}}, "table is None, not a number"),
        ({"free": [1]}, "free is [1], not an object"),
    ],
)
def test_a_refusal_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(RecordError) as caught:
        read_record(Tree, {**WHOLE, **change})
    assert str(caught.value).startswith(message)


def test_what_is_missing() -> None:
    with pytest.raises(RecordError, match="it lacks leaf, rate, pair"):
        read_record(Tree, {})
    assert (
        read_record(Tree, {"rate": 1, "pair": [1, "a"]}, leaf=Leaf(name="given")).leaf.name
        == "given"
    )
    with pytest.raises(RecordError, match="'leaf'"):
        read_record(Tree, WHOLE, leaf=Leaf(name="given"))

"""Records are read back strictly, and every refusal names its place."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import pytest

from shardwright.utils.json_values import JsonObject, read_record


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
        ({"more": 1}, "unknown key 'more'"),
        ({"leaf": {"name": "x", "more": 1}}, "leaf: unknown key 'more'"),
        ({"leaf": {"name": "x", "children": [{"name": "y", "more": 1}]}}, "leaf.children[0]: unkn"),
        ({"either": {"name": "x", "more": 1}}, "either: unknown key 'more'"),
        ({"leaf": {}}, "leaf: object missing required field `name`"),
        ({"leaf": None}, "leaf: expected `object`, got `null`"),
        (
            {"leaf": {"name": "x", "children": [{"name": 1}]}},
            "leaf.children[0].name: expected `str`, got `int`",
        ),
        ({"leaf": {"name": "x", "sizes": [1, True]}}, "leaf.sizes[1]: expected `int`, got `bool`"),
        ({"leaf": {"name": "x", "sizes": [1.0]}}, "leaf.sizes[0]: expected `int`, got `float`"),
        ({"leaf": {"name": "x", "sizes": "12"}}, "leaf.sizes: expected `array`, got `str`"),
        ({"rate": "2"}, "rate: expected `float`, got `str`"),
        ({"rate": 10**400}, "rate: number out of range"),
        ({"pair": [1]}, "pair: expected `array` of length 2, got 1"),
        ({"word": "c"}, "word: invalid enum value 'c'"),
        ({"either": 3}, "either: expected `str | object | null`, got `int`"),
        ({"flag": 0}, "flag: expected `bool`, got `int`"),
        ({"table": {"bf16": None}}, "table[...]: expected `float`, got `null`"),
        ({"free": [1]}, "free: expected `object`, got `array`"),
    ],
)
def test_a_refusal_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        read_record(Tree, {**WHOLE, **change})
    assert str(caught.value).startswith(message)


def test_what_is_no_record() -> None:
    for value, message in (
        ({}, "object missing required field `leaf`"),
        ([], "expected `object`, got `array`"),
        ({1: 2}, "expected `str`"),
    ):
        with pytest.raises(ValueError, match=message):
            read_record(Tree, value)


def test_a_record_stays_what_it_is() -> None:
    leaf = Leaf(name="given")
    assert read_record(Tree, {**WHOLE, "leaf": leaf}).leaf is leaf

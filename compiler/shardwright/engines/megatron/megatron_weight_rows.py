"""How one of Megatron's parameters is made of Hugging Face's: rows of one rank's shards, in both
directions.

A rank's shard of a Hugging Face parameter is what the plan's cut gives it
(ir.partition.ParameterSharding). Megatron holds the same numbers, several parameters in one, in an
order of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHeads:
    """What a rank has of the attention: query heads, key/value heads, features of a head."""

    query: int
    groups: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRange:
    """name: Hugging Face's, behind the layer's path. `count` rows from `theirs` of its shard are
    those from `own` of Megatron's parameter. A row is everything behind its first dimension."""

    name: str
    hf_start: int
    own: int
    count: int


RowSource = Callable[[int, RankHeads], list[RowRange]]
"""(rows of Megatron's parameter on this rank, its share of the attention) -> where they come
from."""


def copied_rows(name: str) -> RowSource:
    return lambda rows, heads: [RowRange(name=name, hf_start=0, own=0, count=rows)]


def stacked_rows(*names: str) -> RowSource:
    """One below the other, as many rows of each: gate and up."""

    def rows_of(rows: int, heads: RankHeads) -> list[RowRange]:
        each = rows // len(names)
        return [
            RowRange(name=name, hf_start=0, own=place * each, count=each)
            for place, name in enumerate(names)
        ]

    return rows_of


def grouped_qkv_rows(query: str, key: str, value: str) -> RowSource:
    """Megatron's linear_qkv: for each key/value head its query heads, the key, the value."""

    def rows_of(rows: int, heads: RankHeads) -> list[RowRange]:
        wide, found = heads.query // heads.groups * heads.size, []
        for group in range(heads.groups):
            own = group * (wide + 2 * heads.size)
            found.append(RowRange(name=query, hf_start=group * wide, own=own, count=wide))
            for place, name in enumerate((key, value)):
                start = own + wide + place * heads.size
                found.append(
                    RowRange(name=name, hf_start=group * heads.size, own=start, count=heads.size)
                )
        return found

    return rows_of


def fused_qkv_rows(name: str) -> RowSource:
    """The same of one parameter that has all queries, then all keys, then all values: GPT-2's."""

    def rows_of(rows: int, heads: RankHeads) -> list[RowRange]:
        blocks = {
            "q": 0,
            "k": heads.query * heads.size,
            "v": (heads.query + heads.groups) * heads.size,
        }
        return [
            RowRange(name=name, hf_start=blocks[r.name] + r.hf_start, own=r.own, count=r.count)
            for r in grouped_qkv_rows("q", "k", "v")(rows, heads)
        ]

    return rows_of

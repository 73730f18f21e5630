"""Figures of the proofs, from lines and ranks to one number each. What is not finite never becomes
a good one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardwright.utils.numeric_difference import largest_difference, max_series_diff

if TYPE_CHECKING:
    from shardwright.verify.reference_run import Reference


def training_apart(
    losses: Sequence[float | None], norms: Sequence[float | None], wanted: Reference
) -> dict[str, float]:
    """loss: absolute; norm: relative."""
    return {
        "loss": max_series_diff(losses, wanted.losses),
        "norm": max_series_diff(norms, wanted.grad_norms, relative=True),
    }


def lines_apart(lines: Sequence[Mapping[str, Any]], wanted: Reference) -> dict[str, float]:
    """lines: of metrics.jsonl."""
    return training_apart([m["loss"] for m in lines], [m["grad_norm"] for m in lines], wanted)


def worst_of_ranks(ranks: Sequence[Mapping[str, Any]], world: int) -> dict[str, float]:
    """The worst of each figure; every rank has to have reported all of them."""
    assert len(ranks) == world, f"{len(ranks)} of {world} ranks reported"
    assert all(found.keys() == ranks[0].keys() for found in ranks), [
        sorted(found) for found in ranks
    ]
    return {key: largest_difference(found[key] for found in ranks) for key in ranks[0]}


def same(got: Any, wanted: Any) -> bool:
    """Equal, and every number finite: Python takes a NaN for equal to itself, and null for equal to
    null."""
    return bool(got == wanted) and all(isinstance(x, str) or _finite(x) for x in _leaves(got))


def as_json(value: Any) -> Any:
    """null for what is not finite: JSON has neither NaN nor infinity."""
    if isinstance(value, Mapping):
        return {key: as_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def worst_of_cases(cases: Iterable[Mapping[str, Any]], key: str) -> float:
    """Of a file in benchmarks/, where null is what was not finite."""
    return largest_difference(math.inf if case[key] is None else case[key] for case in cases)


def _leaves(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(inner)
    else:
        yield value


def _finite(value: Any) -> bool:
    return value is not None and math.isfinite(value)

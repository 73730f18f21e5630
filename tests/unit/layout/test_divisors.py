"""Degrees against a world: both recipe/cross_key_checks.py (SW1203) and search/layout_rules.py
(SW3101) ask `misfit`."""

from __future__ import annotations

import itertools
import math

import pytest

from shardwright.utils.divisors import degree_mismatch


@pytest.mark.parametrize("world", (1, 6, 8, 12, 48))
@pytest.mark.parametrize("count", (1, 2, 3))
def test_what_a_degree_could_be_makes_up_the_world(world: int, count: int) -> None:
    for values in itertools.product((1, 2, 3, 4, 7, 16), repeat=count):
        degrees = dict(zip(("tensor", "pipeline", "data"), values, strict=False))
        complete = count == 3
        product = math.prod(values)
        found = degree_mismatch(degrees, world, complete=complete)
        assert (found is None) == (product == world if complete else world % product == 0)
        if found is None:
            continue
        culprit, near = found
        assert degrees[culprit] == max(values)
        assert near or world % (product // degrees[culprit])
        others = product // degrees[culprit]
        for degree in near:
            assert (
                degree_mismatch({**degrees, culprit: degree}, world, complete=complete) is None
                or world % others
            )


def test_only_what_was_asked_for_is_blamed() -> None:
    degrees = {"tensor": 2, "pipeline": 1, "data": 8}
    assert degree_mismatch(degrees, 8, complete=True) == ("data", (4,))
    assert degree_mismatch(degrees, 8, complete=True, blamed=["tensor"]) == ("tensor", (1,))

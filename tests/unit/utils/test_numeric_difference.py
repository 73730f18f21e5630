"""How far apart: what is not finite, not there or of another shape is infinitely far."""

from __future__ import annotations

import math

import pytest
import torch

from shardwright.utils.numeric_difference import (
    difference,
    largest_difference,
    max_abs_diff,
    max_series_diff,
    relative_error,
    state_dict_max_abs_diff,
)

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("got", "wanted", "absolute", "relative"),
    [
        (1.5, 1.0, 0.5, 0.5),
        (1.0, 2.0, 1.0, 0.5),
        (-1.0, 1.0, 2.0, 2.0),
        (0.0, 0.0, 0.0, 0.0),
        (1e-9, 0.0, 1e-9, INF),
        (NAN, 1.0, INF, INF),
        (1.0, NAN, INF, INF),
        (NAN, NAN, INF, INF),
        (INF, 1.0, INF, INF),
        (1.0, -INF, INF, INF),
        (INF, INF, INF, INF),
        (None, 1.0, INF, INF),
        (None, None, INF, INF),
    ],
)
def test_two_numbers(
    got: float | None, wanted: float | None, absolute: float, relative: float
) -> None:
    assert (difference(got, wanted), difference(got, wanted, relative=True)) == (absolute, relative)


@pytest.mark.parametrize("place", range(3))
def test_a_nan_is_the_worst_wherever_it_stands(place: int) -> None:
    numbers: list[float] = [1.0, 2.0, 3.0]
    planted = [*numbers[:place], NAN, *numbers[place + 1 :]]
    assert largest_difference(planted) == INF
    assert (
        max_series_diff(planted, numbers)
        == max_series_diff(numbers, planted)
        == max_series_diff(planted, planted)
        == INF
    )
    assert max_abs_diff(torch.tensor(planted), torch.tensor(numbers)) == INF
    assert max_abs_diff(torch.tensor(planted), torch.tensor(planted)) == INF
    assert relative_error(torch.tensor(planted), torch.tensor(numbers)) == INF
    assert relative_error(torch.tensor(numbers), torch.tensor(planted), smallest_scale=1.0) == INF


def test_series() -> None:
    assert max_series_diff([1.0, 2.5], [1.0, 2.0]) == 0.5
    assert max_series_diff([1.0, 2.5], [1.0, 2.0], relative=True) == 0.25
    assert max_series_diff([1.0], [1.0, 1.0]) == max_series_diff([1.0, 1.0], [1.0]) == INF
    assert max_series_diff([], []) == INF == largest_difference([])


def test_tensors() -> None:
    a = torch.tensor([[1.0, -4.0]])
    assert max_abs_diff(a, a) == 0 == max_abs_diff(torch.zeros(0), torch.zeros(0))
    assert max_abs_diff(a + 0.5, a) == 0.5 and relative_error(a + 0.5, a) == 0.125
    assert relative_error(a + 0.5, a, smallest_scale=5.0) == 0.1
    assert (
        max_abs_diff(a, a.t()) == max_abs_diff(a, a[:, :1]) == max_abs_diff(a, a.reshape(2)) == INF
    )
    infinite = torch.tensor([[1.0, -INF]])
    assert max_abs_diff(infinite, a) == max_abs_diff(infinite, infinite) == INF
    assert (
        relative_error(a, torch.zeros(1, 2)) == INF
        and relative_error(torch.zeros(2), torch.zeros(2)) == 0
    )
    assert max_abs_diff(torch.nn.Parameter(a), a.bfloat16()) == 0


def test_weights() -> None:
    a, b = torch.ones(2), torch.zeros(3)
    assert state_dict_max_abs_diff({"a": a, "b": b}, {"b": b + 0.25, "a": a}) == 0.25
    assert (
        state_dict_max_abs_diff({"a": a}, {"a": a, "b": b})
        == state_dict_max_abs_diff({"a": a, "b": b}, {"a": a})
        == INF
    )
    assert state_dict_max_abs_diff({}, {}) == INF

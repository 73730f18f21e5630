"""How far apart: what is not finite, not there or of another shape is infinitely far."""

from __future__ import annotations

import math

import pytest
import torch

from shardwright.utils.numeric_difference import (
    apart,
    series_apart,
    share_apart,
    tensor_apart,
    weights_apart,
    worst,
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
    assert (apart(got, wanted), apart(got, wanted, relative=True)) == (absolute, relative)


@pytest.mark.parametrize("place", range(3))
def test_a_nan_is_the_worst_wherever_it_stands(place: int) -> None:
    numbers: list[float] = [1.0, 2.0, 3.0]
    planted = [*numbers[:place], NAN, *numbers[place + 1 :]]
    assert worst(planted) == INF
    assert (
        series_apart(planted, numbers)
        == series_apart(numbers, planted)
        == series_apart(planted, planted)
        == INF
    )
    assert tensor_apart(torch.tensor(planted), torch.tensor(numbers)) == INF
    assert tensor_apart(torch.tensor(planted), torch.tensor(planted)) == INF
    assert share_apart(torch.tensor(planted), torch.tensor(numbers)) == INF
    assert share_apart(torch.tensor(numbers), torch.tensor(planted), least=1.0) == INF


def test_series() -> None:
    assert series_apart([1.0, 2.5], [1.0, 2.0]) == 0.5
    assert series_apart([1.0, 2.5], [1.0, 2.0], relative=True) == 0.25
    assert series_apart([1.0], [1.0, 1.0]) == series_apart([1.0, 1.0], [1.0]) == INF
    assert series_apart([], []) == INF == worst([])


def test_tensors() -> None:
    a = torch.tensor([[1.0, -4.0]])
    assert tensor_apart(a, a) == 0 == tensor_apart(torch.zeros(0), torch.zeros(0))
    assert tensor_apart(a + 0.5, a) == 0.5 and share_apart(a + 0.5, a) == 0.125
    assert share_apart(a + 0.5, a, least=5.0) == 0.1
    assert (
        tensor_apart(a, a.t()) == tensor_apart(a, a[:, :1]) == tensor_apart(a, a.reshape(2)) == INF
    )
    infinite = torch.tensor([[1.0, -INF]])
    assert tensor_apart(infinite, a) == tensor_apart(infinite, infinite) == INF
    assert (
        share_apart(a, torch.zeros(1, 2)) == INF
        and share_apart(torch.zeros(2), torch.zeros(2)) == 0
    )
    assert tensor_apart(torch.nn.Parameter(a), a.bfloat16()) == 0


def test_weights() -> None:
    a, b = torch.ones(2), torch.zeros(3)
    assert weights_apart({"a": a, "b": b}, {"b": b + 0.25, "a": a}) == 0.25
    assert (
        weights_apart({"a": a}, {"a": a, "b": b})
        == weights_apart({"a": a, "b": b}, {"a": a})
        == INF
    )
    assert weights_apart({}, {}) == INF

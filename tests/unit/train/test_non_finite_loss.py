"""Losses that are no finite numbers: said once, ended after some in a row, not mixed up with fp16's
skipped steps."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from shardwright.diagnostics import Refusal
from shardwright.train.training_metrics import NonfiniteLossGuard

NAN, INF = math.nan, math.inf


def divergence(limit: int = 3, precision: str = "bf16") -> NonfiniteLossGuard:
    training: Any = SimpleNamespace(stop_after_nonfinite=limit, precision=precision)
    return NonfiniteLossGuard(SimpleNamespace(training=training))  # type: ignore[arg-type]


def test_the_first_is_said_and_some_in_a_row_end_the_run() -> None:
    d = divergence(limit=3)
    assert d.step(1, 2.5, 1.0) == [] and d.finite
    (line,) = d.step(2, NAN, NAN)
    assert line == (
        "warning[SW6310]: step 2: the loss is nan; the run ends after 3 in a row "
        "(training.stop_after_nonfinite)"
    )
    assert not d.finite
    assert d.step(3, INF, 1.0) == []
    assert d.step(4, 2.5, 1.0) == [] and d.finite  # not in a row
    assert d.step(5, NAN, 1.0) == d.step(6, -INF, 1.0) == []
    with pytest.raises(Refusal) as refusal:
        d.step(7, NAN, 1.0)
    (diagnostic,) = refusal.value.diagnostics
    assert diagnostic.code == "SW6311" and "in steps 5 to 7" in diagnostic.message
    assert "training.optimizer.lr" in diagnostic.help


def test_one_suffices_or_none_does() -> None:
    with pytest.raises(Refusal, match="in step 1"):
        divergence(limit=1).step(1, NAN, 1.0)
    d = divergence(limit=0)
    (line,) = d.step(1, NAN, 1.0)
    assert "the run continues" in line
    for step in range(2, 50):
        assert d.step(step, NAN, 1.0) == []


def test_a_gradient_that_is_none_is_said_once_and_counts_for_nothing() -> None:
    d = divergence(limit=2)
    (line,) = d.step(1, 2.5, INF)
    assert line == "warning[SW6312]: step 1: the gradient norm is inf, and the loss is 2.5000"
    for step in range(2, 9):
        assert d.step(step, 2.5, NAN) == [] and d.finite


def test_steps_that_fp16s_loss_scaler_skips_are_nothing_to_speak_of() -> None:
    """DeepSpeed gives infinity for their norm."""
    d = divergence(limit=2, precision="fp16")
    for step in range(1, 9):
        assert d.step(step, 2.5, INF) == [] and d.finite
    assert len(d.step(9, NAN, INF)) == 1

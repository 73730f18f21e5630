"""What `verify` makes of a training that was planted: no launcher, no model."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwright.cli.compile_commands import verification_json, verification_text
from shardwright.monitor.attempt_records import METRICS_FILE
from shardwright.verify import layout_verification
from shardwright.verify.layout_verification import Comparison, VerificationResult
from shardwright.verify.reference_run import Reference

STEPS = [4.0, 3.0, 2.0]
WEIGHTS = {"first": torch.ones(2, 2), "second": torch.full((3,), 2.0)}
Rows = list[dict[str, Any]]


def rows() -> Rows:
    return [
        {"step": k, "loss": x, "grad_norm": x, "learning_rate": x} for k, x in enumerate(STEPS, 1)
    ]


def measured(
    monkeypatch: pytest.MonkeyPatch,
    found: list[Rows],
    weights: list[dict[str, torch.Tensor]],
    held_out: list[Rows] | None = None,
) -> VerificationResult:
    """found, weights, held_out: of the run and of its resumption."""
    evaluations = iter(held_out or [])
    runs, exports = iter(found), iter(weights)
    monkeypatch.setattr(layout_verification, "_launch", lambda out: None)
    monkeypatch.setattr(
        layout_verification,
        "read_json_lines",
        lambda path: next(runs if path.name == Path(METRICS_FILE).name else evaluations),
    )
    monkeypatch.setattr(layout_verification, "_exported", lambda plan, out, target: next(exports))
    monkeypatch.setattr(shutil, "rmtree", lambda path: None)
    plan: Any = SimpleNamespace(
        ranks=(), lora=None, checkpoint=SimpleNamespace(directory="checkpoints")
    )
    frozen = {**WEIGHTS, "unused": torch.ones(1)}
    wanted = Reference(STEPS, STEPS, STEPS, frozen, frozenset({"unused"}))
    if held_out is not None:
        wanted = dataclasses.replace(wanted, held_out={3: 2.5, 6: 1.5})
    checks = layout_verification._measure(Path("folder"), plan, wanted, lambda stage: None)
    return VerificationResult(
        architecture="a", parameters=1, layout="", verified="", checks=checks, seconds=0.0
    )


def value(key: str, bad: float | None) -> Callable[[Rows], Rows]:
    return lambda found: [found[0], {**found[1], key: bad}, *found[2:]]


def test_it_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    exported = {**WEIGHTS, "unused": torch.zeros(1)}  # ZeRO's optimizer decays it
    assert measured(monkeypatch, [rows(), rows()], [exported, exported]).matches


@pytest.mark.parametrize("bad", [math.nan, math.inf, None])
@pytest.mark.parametrize(
    ("key", "name"),
    [("loss", "losses"), ("grad_norm", "gradient norms"), ("learning_rate", "learning rates")],
)
def test_the_second_step(
    key: str, name: str, bad: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = measured(monkeypatch, [value(key, bad)(rows())], [WEIGHTS])
    assert [check.name for check in verdict.checks if not check.passed] == [name]


def test_a_run_that_resumes_into_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = measured(monkeypatch, [rows(), value("loss", math.nan)(rows())], [WEIGHTS, WEIGHTS])
    assert [check.name for check in verdict.checks if not check.passed] == ["resume"]


def planted(name: str) -> dict[str, torch.Tensor]:
    weights = {n: w.clone() for n, w in WEIGHTS.items()}
    weights[name].view(-1)[-1] = math.nan
    return weights


@pytest.mark.parametrize(
    "weights",
    [
        planted("first"),
        planted("second"),
        {"first": WEIGHTS["first"]},
        {**WEIGHTS, "third": torch.ones(1)},
    ],
)
def test_weights(weights: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = measured(monkeypatch, [rows()], [weights])
    assert [check.name for check in verdict.checks if not check.passed] == ["weights"]
    verdict = measured(monkeypatch, [rows(), rows()], [WEIGHTS, weights])
    assert [check.name for check in verdict.checks if not check.passed] == ["resumed weights"]


EVALUATED: Rows = [{"step": 3, "loss": 2.5}, {"step": 6, "loss": 1.5}]
HELD_OUT_BADLY: dict[str, Rows] = {
    "another loss": [EVALUATED[0], {"step": 6, "loss": 1.6}],
    "nan": [EVALUATED[0], {"step": 6, "loss": math.nan}],
    "null": [EVALUATED[0], {"step": 6, "loss": None}],
    "one of two": EVALUATED[:1],
    "after another step": [{"step": 2, "loss": 2.5}, EVALUATED[1]],
    "never": [],
}


@pytest.mark.parametrize("bad", HELD_OUT_BADLY.values(), ids=HELD_OUT_BADLY)
def test_held_out_losses(bad: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured(
        monkeypatch, [rows(), rows()], [WEIGHTS, WEIGHTS], [EVALUATED, EVALUATED]
    ).matches
    verdict = measured(monkeypatch, [rows()], [WEIGHTS], [bad])
    assert [check.name for check in verdict.checks if not check.passed] == ["held-out losses"]
    verdict = measured(monkeypatch, [rows(), rows()], [WEIGHTS, WEIGHTS], [EVALUATED, bad])
    assert [check.name for check in verdict.checks if not check.passed] == [
        "resumed held-out losses"
    ]


def test_infinity_in_print() -> None:
    check = Comparison(name="losses", what="of 6 steps", worst=math.inf, limit=1e-5)
    verdict = VerificationResult(
        architecture="a", parameters=1, layout="", verified="", checks=(check,), seconds=0.0
    )
    document = json.loads(verification_json("r", verdict), parse_constant=pytest.fail)
    assert (
        document["checks"][0]["worst"] is None
        and not document["checks"][0]["passed"]
        and not document["same"]
    )
    assert "off by inf" in verification_text("r", verdict)

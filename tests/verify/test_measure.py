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
from shardwright.recipe.objectives import PLAIN_OBJECTIVE, ObjectiveSection
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
    objective: ObjectiveSection = PLAIN_OBJECTIVE,
    metrics: list[dict[str, float]] | None = None,
) -> VerificationResult:
    """found, weights, held_out: of the run and of its resumption. metrics: the plain process's."""
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
        ranks=(),
        lora=None,
        checkpoint=SimpleNamespace(directory="checkpoints"),
        training=SimpleNamespace(objective=objective),
    )
    frozen = {**WEIGHTS, "unused": torch.ones(1)}
    wanted = Reference(STEPS, STEPS, STEPS, frozen, frozenset({"unused"}), metrics=metrics or [])
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


PAIRS: Rows = [
    {**row, "accuracy": accuracy, "margin": 0.1}
    for row, accuracy in zip(rows(), (1.0, 0.5, 0.75), strict=True)
]
DPO = ObjectiveSection(name="dpo", beta=0.1)


def with_metrics(
    monkeypatch: pytest.MonkeyPatch, lines: Rows, objective: ObjectiveSection = DPO
) -> list[str]:
    """The comparisons that fail."""
    metrics = [{k: row[k] for k in ("accuracy", "margin")} for row in PAIRS]
    verdict = measured(
        monkeypatch,
        [lines, PAIRS],
        [WEIGHTS, WEIGHTS],
        objective=objective,
        metrics=metrics,
    )
    assert "metrics" in [check.name for check in verdict.checks]
    return [check.name for check in verdict.checks if not check.passed]


@pytest.mark.parametrize("bad", [0.6, math.nan, None])
@pytest.mark.parametrize("key", ["accuracy", "margin"])
def test_metrics_of_the_objective(
    key: str, bad: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert with_metrics(monkeypatch, PAIRS) == []
    assert with_metrics(monkeypatch, value(key, bad)(PAIRS)) == ["metrics"]
    missing = [PAIRS[0], {k: v for k, v in PAIRS[1].items() if k != key}, PAIRS[2]]
    assert with_metrics(monkeypatch, missing) == ["metrics"]


def test_the_accuracy_of_a_model_that_is_its_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding decides it at the first step, but not against another model, nor without one."""
    lines = [{**PAIRS[0], "accuracy": 0.0}, *PAIRS[1:]]
    assert with_metrics(monkeypatch, lines) == []
    other = ObjectiveSection(name="dpo", beta=0.1, reference="/another")
    assert with_metrics(monkeypatch, lines, other) == ["metrics"]
    simpo = ObjectiveSection(name="simpo", beta=2.0, gamma=1.0)
    assert with_metrics(monkeypatch, lines, simpo) == ["metrics"]


def test_losses_that_are_squares_are_compared_relatively(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = value("loss", STEPS[1] + 3e-5)(PAIRS)
    assert with_metrics(monkeypatch, lines) == ["losses"]
    assert with_metrics(monkeypatch, lines, ObjectiveSection(name="ipo", beta=0.1)) == []


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

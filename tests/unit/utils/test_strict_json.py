"""What programs read is JSON: a number that is not finite is null, with a word beside it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from shardwright.launch.launcher_process import TrainingProgress
from shardwright.monitor.run_files import (
    PROGRESS,
    EvaluationWriter,
    MetricsWriter,
    evaluated_step,
    read_json,
    write_json,
)
from shardwright.utils.json_values import strict_json

NAN, INF = math.nan, math.inf


def strict(text: str) -> Any:
    return json.loads(text, parse_constant=pytest.fail)


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ({"a": 1.5, "b": [1, "x", None, True]}, {"a": 1.5, "b": [1, "x", None, True]}),
        ({"a": NAN}, {"a": None, "finite": False}),
        ({"a": {"b": INF, "c": 1}, "d": 2}, {"a": {"b": None, "c": 1, "finite": False}, "d": 2}),
        ({"a": [1.0, [-INF]]}, {"a": [1.0, [None]], "finite": False}),
        ({"a": [{"b": NAN}]}, {"a": [{"b": None, "finite": False}]}),
        ([NAN, 1], [None, 1]),
        ({"a": (1, 2)}, {"a": [1, 2]}),
    ],
)
def test_finite_or_null(value: object, wanted: object) -> None:
    assert strict(strict_json(value)) == wanted


def test_a_runs_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_json(
        tmp_path / "run" / "status.json", {"status": "failed", "loss": {"first": 2.0, "last": NAN}}
    )
    status = strict((tmp_path / "run" / "status.json").read_text())
    assert status == {"status": "failed", "loss": {"first": 2.0, "last": None, "finite": False}}
    assert read_json(tmp_path / "run" / "status.json") == status

    metrics = MetricsWriter(tmp_path, 1, 0)
    metrics.write(1, 2.0, 1.0, 1e-3, 64, 0.5)
    metrics.write(2, NAN, INF, 1e-3, 64, 0.5)
    first, second = map(strict, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert first["loss"] == 2.0 and "finite" not in first
    assert (second["loss"], second["grad_norm"], second["finite"]) == (None, None, False)
    progress = [line.removeprefix(PROGRESS) for line in capsys.readouterr().out.splitlines()]
    TrainingProgress(2).show(progress[1])
    assert "step 2/2  loss nan  grad_norm nan" in capsys.readouterr().out


@pytest.mark.parametrize("loss", [NAN, INF])
def test_a_validation(loss: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    evaluations = EvaluationWriter(tmp_path, 1, 0)
    evaluations.write(4, 2.0, 100, 0.1)
    evaluations.write(8, loss, 100, 0.1)
    line = strict((tmp_path / "run" / "evaluation.jsonl").read_text().splitlines()[1])
    assert (line["loss"], line["perplexity"], line["finite"]) == (None, None, False)
    assert evaluated_step(tmp_path) == 8
    assert "validation at step 8  loss" in capsys.readouterr().out


def test_the_last_validation_behind_a_half_written_line(tmp_path: Path) -> None:
    assert evaluated_step(tmp_path) == 0
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "evaluation.jsonl").write_text('{"step": 4, "loss": 1.0}\n{"step": 8, "lo')
    assert evaluated_step(tmp_path) == 4
    assert EvaluationWriter(tmp_path, 2, 4).step == 4
    assert EvaluationWriter(tmp_path, 3, 3).step == 0  # cut back to an earlier step

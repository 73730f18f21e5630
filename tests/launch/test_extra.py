"""Monitoring asked for in `extra` is there after a run."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from tests.parity.harness import STEPS, Case, metrics, must, recipe, shardwright, write_inputs

pytestmark = pytest.mark.launch


def test_csv_monitor_and_wall_clock_breakdown(tmp_path: Path) -> None:
    case = Case(model="llama", data=2)
    write_inputs(case, tmp_path)
    document = recipe(case, tmp_path)
    document["extra"] = {
        "csv_monitor": {"enabled": True, "output_path": "run/csv", "job_name": "loss"},
        "wall_clock_breakdown": True,
        "steps_per_print": 1,
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(document))
    out = tmp_path / "out"
    must(shardwright("compile", tmp_path / "recipe.yaml", "-o", out))
    must(shardwright("run", out))
    with (out / "run/csv/loss/Train_Samples_lr.csv").open() as table:
        rates = [float(rate) for _, rate in list(csv.reader(table))[1:]]
    assert rates == pytest.approx([line["learning_rate"] for line in metrics(out)])
    assert len(rates) == STEPS
    assert "time (ms)" in (out / "run" / "launcher.log").read_text()

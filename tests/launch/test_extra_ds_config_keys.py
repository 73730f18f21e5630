"""Monitoring asked for in `extra` is there after a run; every key that may stand there leaves
checkpoints whole."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwright.utils.numeric_difference import max_series_diff
from tests.launch.extra_keys import HALF_RELATIVE, LAYOUTS, RESUMED_ON, cases, name, tried
from tests.parity.harness import (
    LOSS_ABSOLUTE,
    STEPS,
    Case,
    metrics,
    must,
    recipe,
    shardwright,
    write_inputs,
)

pytestmark = pytest.mark.launch


@pytest.mark.prove
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


@pytest.mark.prove
def test_every_key_resumes_on_another_layout(
    tmp_path: Path, proved: Callable[[str, str, dict[str, Any]], None]
) -> None:
    """What may stand in `extra` changes neither the training nor what another layout makes of its
    checkpoint."""
    found = tried(tmp_path)
    assert not {case: figures["error"] for case, figures in found.items() if "error" in figures}
    for key, layout in cases():
        figures = found[name(key, layout)]
        apart = {
            "resumed": max_series_diff(
                figures["resumed"]["losses"], figures["run"]["losses"], relative=True
            ),
            # fp16's scale decides which updates are made.
            "plain": max_series_diff(
                figures["run"]["losses"], found[name("", layout)]["run"]["losses"]
            )
            if not layout.startswith("fp16")
            else 0.0,
        }
        proved("extra", name(key, layout), {**apart, "resumed_on": RESUMED_ON[layout]})
        assert apart["plain"] <= LOSS_ABSOLUTE, (key, layout, figures)
        half = LAYOUTS[layout].precision != "fp32"
        assert apart["resumed"] <= (HALF_RELATIVE if half else LOSS_ABSOLUTE), (
            key,
            layout,
            figures,
        )

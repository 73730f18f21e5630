"""The gradient noise scale against the gradient of every row, in each layout that has it. Many in
one launch."""

from __future__ import annotations

import dataclasses
import json
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.launch.test_overhead import MODEL, WARM_UP
from tests.parity.case_launches import launched
from tests.parity.harness import metrics, must, newest_checkpoint, recipe, shardwright
from tests.parity.noise import CASES, SAMPLE

pytestmark = pytest.mark.launch
RELATIVE, BF16_RELATIVE = 1e-5, 2e-2
MOST_OVERHEAD, EVERY = 0.02, 50
"""Share of the time of steps that measuring one in EVERY of them takes."""


def check(found: dict[str, dict[str, Any]]) -> None:
    for name, figures in found.items():
        limit = BF16_RELATIVE if CASES[name].precision == "bf16" else RELATIVE
        assert figures["path"] == 0.0, (name, "the hooks changed what is trained")
        assert figures["labels"] == 0.0, (name, figures)
        compared = (
            "squares",
            "whole",
            *(("variance", "square") if CASES[name].rows_are_comparable else ()),
        )
        assert all(figures[key] <= limit for key in compared), (name, figures)


def test_sums_are_those_of_every_row(tmp_path: Path) -> None:
    check(launched({name: CASES[name] for name in SAMPLE}, tmp_path, "noise_worker.py"))


@pytest.mark.prove
def test_a_run_that_resumes_tells_of_all_its_measured_steps(tmp_path: Path) -> None:
    document = recipe(CASES["zero1-data"], tmp_path) | {"data": {"kind": "synthetic"}}
    document["training"]["steps"] = 12
    document["tracking"] = {"noise_scale": {"every_steps": 1, "rows": 4}}
    document["checkpoint"] = {"every_steps": 10}
    (tmp_path / "recipe.yaml").write_text(json.dumps(document))
    out = tmp_path / "out"
    must(shardwright("compile", tmp_path / "recipe.yaml", "-o", out))
    must(shardwright("run", out))
    lines = metrics(out)
    shutil.rmtree(newest_checkpoint(out))
    must(shardwright("run", out))
    again = metrics(out)
    assert [line["step"] for line in again] == list(range(1, 13)) and again[-1]["attempt"] == 2
    assert [line["noise_scale"] for line in again] == [line["noise_scale"] for line in lines]
    last = again[-1]["noise_scale"]
    assert (last["rows"], last["steps"]) == (4, 6)
    found = json.loads(must(shardwright("status", out, "--json")).stdout)["noise_scale"]
    assert found == {
        **{key: last[key] for key in ("value", "low", "high", "steps", "rows")},
        "batch": 8,
        "step": 12,
    }


@pytest.mark.prove
@pytest.mark.parametrize("world", [2, 4])
def test_every_layout(
    world: int, tmp_path: Path, proved: Callable[[str, str, dict[str, Any]], None]
) -> None:
    found = launched(
        {n: c for n, c in CASES.items() if c.world == world}, tmp_path, "noise_worker.py"
    )
    for name, figures in found.items():
        proved("noise-scale", name, figures)
    check(found)


@pytest.mark.prove
@pytest.mark.parametrize("name", ["zero3-data", "pipeline"])
def test_measuring_takes_little_time(
    name: str, tmp_path: Path, proved: Callable[[str, str, dict[str, Any]], None]
) -> None:
    """Measured and unmeasured steps by turns in one run."""
    document = recipe(dataclasses.replace(CASES[name], micro=2), tmp_path) | {
        "data": {"kind": "synthetic"}
    }
    document["model"] = {"config": MODEL, "weights": "random"}
    document["training"] |= {"sequence_length": 128, "steps": 30}
    document["tracking"] = {"noise_scale": {"every_steps": 2, "rows": 32}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(document))
    must(shardwright("compile", tmp_path / "recipe.yaml", "-o", tmp_path / "out"))
    must(shardwright("run", tmp_path / "out"))
    lines = metrics(tmp_path / "out")
    assert [line["step"] for line in lines if "noise_scale" in line] == list(range(2, 31, 2))
    seconds = [line["step_seconds"] for line in lines]
    pairs = list(zip(seconds[::2], seconds[1::2], strict=True))[WARM_UP:]
    ratio = statistics.median(measured / plain for plain, measured in pairs)
    share = (ratio - 1) / EVERY
    figures = {
        "pairs": len(pairs),
        "measured_to_plain": round(ratio, 4),
        "share_every_50": round(share, 6),
    }
    proved("noise-scale", f"seconds-{name}", figures)
    assert share <= MOST_OVERHEAD, figures

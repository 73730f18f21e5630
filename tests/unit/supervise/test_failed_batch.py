"""Which step of a run that diverged is the first suspect."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from shardwright.compile.recipe_compiler import compile_recipe
from shardwright.plan.plan import Plan
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.supervise.failed_batch import first_nonfinite_step


@pytest.fixture
def plan(write_recipe: Callable[..., Path]) -> Plan:
    return compile_recipe(load_recipe(write_recipe({}))).plan


@pytest.mark.parametrize(
    ("lines", "in_fp32", "in_fp16"),
    [
        ([(1.0, 1.0), (None, 1.0), (None, None)], 2, 2),
        # The gradient spoils the weights; the next step's loss tells it. A loss scaler leaves such
        # a step out.
        ([(1.0, 1.0), (1.0, None), (None, None)], 2, 3),
        ([(None, None), (1.0, 1.0), (1.0, None)], None, None),
        ([(None, None), (None, None)], 1, 1),
        ([], None, None),
    ],
)
def test_the_first_step(
    plan: Plan,
    tmp_path: Path,
    lines: list[tuple[float | None, float | None]],
    in_fp32: int | None,
    in_fp16: int | None,
) -> None:
    (tmp_path / "run").mkdir()
    rows = [
        json.dumps({"step": k, "loss": loss, "grad_norm": norm}) + "\n"
        for k, (loss, norm) in enumerate(lines, 1)
    ]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(rows))
    half = replace(plan, training=replace(plan.training, precision="fp16"))
    assert first_nonfinite_step(plan, tmp_path) == in_fp32
    assert first_nonfinite_step(half, tmp_path) == in_fp16


def test_a_skipped_step_is_no_suspect(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    rows = ({"step": 1, "skipped": True}, {"step": 2, "loss": None, "grad_norm": None})
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "run" / "metrics.jsonl").write_text(text)
    assert first_nonfinite_step(plan, tmp_path) == 2

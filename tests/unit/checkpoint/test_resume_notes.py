"""What a resumed run is told: other data under the same paths, another learning rate schedule."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwright.checkpoint.checkpoint_loader import data_changes, schedule_changes
from shardwright.checkpoint.checkpoint_manifest import read_manifest, write_manifest
from shardwright.cli import main as cli
from shardwright.data.data_preparation import prepare
from shardwright.data.dataset import data_fingerprints, resolve
from shardwright.plan.plan import Plan, plan_to_json, read_plan
from tests.unit.checkpoint.written_checkpoints import write_checkpoint


@pytest.fixture
def trained(write_recipe: Callable[..., Path], tmp_path: Path) -> Callable[..., tuple[Plan, Path]]:
    """trained({...}) -> (the plan with its epochs counted, a compiled folder)."""

    def compile(changes: dict[str, object]) -> tuple[Plan, Path]:
        assert cli.main(["compile", str(write_recipe(changes)), "-o", str(tmp_path / "out")]) == 0
        plan = read_plan(tmp_path / "out")
        prepare(plan, tmp_path / "out", limit_bytes=None)
        return resolve(plan, tmp_path / "out")[0], tmp_path / "out"

    return compile


def noted(step: Path, **about: Any) -> Path:
    write_manifest(step, dataclasses.replace(read_manifest(step), **about))
    return step


def test_data_that_grew_is_said(tmp_path: Path) -> None:
    step = write_checkpoint(tmp_path, step=8)
    assert data_changes(step, (7, 5), {"a": "1"}) == (), (
        "written before rows were counted, and data looked at"
    )
    noted(step, rows=(1234, 5))
    assert data_changes(step, (1234, 5), {}) == ()
    (warning,) = data_changes(step, (1300, 5), {})
    assert (
        warning.startswith("warning[SW6207]: ")
        and "had 1,234 + 5 sequences and has 1,300 + 5" in warning
    )


CORPUS = {"kind": "text", "path": "*.txt", "tokenizer": "byte", "packing": False}


def test_other_content_under_the_same_path_is_said_by_name(
    trained: Callable[..., tuple[Plan, Path]], tmp_path: Path
) -> None:
    """As many sequences as before, of another text; a copy with other times is the same."""
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("one text " * 999)
    plan, out = trained({"data": CORPUS})
    before, rows = data_fingerprints(plan, out), resolve(plan, out)[1].parts
    step = noted(write_checkpoint(out, step=8), rows=rows, data=before)
    os.utime(corpus, (1, 1))
    prepare(plan, out, limit_bytes=None)
    assert data_changes(step, rows, data_fingerprints(plan, out)) == ()
    corpus.write_text("one test " * 999)
    prepare(plan, out, limit_bytes=None)
    assert resolve(plan, out)[1].parts == rows
    (warning,) = data_changes(step, rows, data_fingerprints(plan, out))
    assert (
        warning.startswith("warning[SW6207]: ")
        and f"{str(tmp_path / '*.txt')!r} changed" in warning
    )


def test_epochs_that_were_changed_stretch_the_schedule_and_it_is_said(
    trained: Callable[..., tuple[Plan, Path]], tmp_path: Path
) -> None:
    (tmp_path / "corpus.txt").write_text("one text " * 9999)
    training = {
        "training.steps": None,
        "training.scheduler": {"name": "linear"},
        "training.optimizer.lr": 1e-3,
    }
    plan, out = trained({"data": CORPUS, **training, "training.epochs": 1})
    steps = plan.training.steps
    step = write_checkpoint(out, step=8)
    (step / "plan.json").write_text(plan_to_json(plan))
    assert schedule_changes(plan, step, 8) == ()
    longer, _ = trained({"data": CORPUS, **training, "training.epochs": 2})
    (warning,) = schedule_changes(longer, step, 8)
    assert warning.startswith("warning[SW6217]: ") and "training.epochs 1.0 -> 2.0" in warning
    assert f"training.steps {steps:,} -> {2 * steps:,}" in warning
    before, now = (1e-3 * (1 - 9 / n) for n in (steps, 2 * steps))
    assert f"step 9 uses {now:.4g}, not {before:.4g}" in warning
    other, _ = trained(
        {"data": CORPUS, **training, "training.epochs": 1, "training.optimizer.lr": 2e-3}
    )
    (warning,) = schedule_changes(other, step, 8)
    assert "training.optimizer.lr 0.001 -> 0.002" in warning and "epochs" not in warning

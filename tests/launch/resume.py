"""A run that lost its last checkpoint, continued: shared by the sample and the full counts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from shardwright.utils.numeric_difference import state_dict_max_abs_diff
from tests.figures import same
from tests.parity.harness import (
    Case,
    metrics,
    must,
    newest_checkpoint,
    recipe,
    shardwright,
    write_inputs,
)


def compiled(case: Case, folder: Path, **training: Any) -> Path:
    """A compiled folder with a checkpoint every 4 steps."""
    write_inputs(case, folder)
    document = recipe(case, folder)
    document["training"] |= training
    document["checkpoint"] = {"every_steps": 4}
    (folder / "recipe.yaml").write_text(json.dumps(document))
    must(shardwright("compile", folder / "recipe.yaml", "-o", folder / "out"))
    return folder / "out"


def exported(out: Path, to: Path) -> dict[str, torch.Tensor]:
    must(shardwright("export", newest_checkpoint(out), "-o", to))
    return load_file(to / "model.safetensors")


def continues_bit_for_bit(case: Case, folder: Path) -> None:
    """Runs 8 steps, takes the last checkpoint away, runs again: metrics and weights must be the
    same bits."""
    out = compiled(case, folder)
    must(shardwright("run", out))
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == [
        "step-00000004",
        "step-00000008",
    ]
    whole, first = exported(out, folder / "whole"), metrics(out)
    shutil.rmtree(out / "checkpoints" / "step-00000008")
    must(shardwright("run", out))
    again, second = exported(out, folder / "again"), metrics(out)
    assert [m["step"] for m in second] == list(range(1, 9))
    assert [m["attempt"] for m in second] == [1] * 4 + [2] * 4
    assert same_numbers(second, first)
    assert state_dict_max_abs_diff(again, whole) == 0


def same_numbers(lines: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> bool:
    """Losses and norms of metrics.jsonl, bit for bit."""
    got, before = ([(m["loss"], m["grad_norm"]) for m in found] for found in (lines, wanted))
    return same(got, before)

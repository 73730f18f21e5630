"""A folder that an earlier version compiled runs as it is, and its checkpoint goes on bit for bit,
there and in a folder that is compiled today.

tests/launch/old_folder was made at 6104a5a: a checkpoint of the fourth step of eight, and the lines
of all of them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.parity.harness import must, shardwright

pytestmark = pytest.mark.launch

OLD = Path(__file__).parent / "old_folder"
SAVED, LAST = 4, 8


def lines(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]


def states(folder: Path) -> dict[str, Any]:
    """Weights and moments of the last step, of both ranks."""
    step = folder / "checkpoints" / f"step-{LAST:08d}"
    files = sorted(step.glob("rank-*.safetensors"))
    assert len(files) == 2
    return {
        f"{file.name} {name}": tensor for file in files for name, tensor in load_file(file).items()
    }


def test_an_older_folder_and_its_checkpoint_go_on(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    shutil.copytree(OLD, theirs)
    must(shardwright("compile", OLD / "recipe.yaml", "-o", ours))
    for part in ("checkpoints", "run"):
        shutil.copytree(OLD / part, ours / part)
    for folder in (theirs, ours):
        told = must(shardwright("run", folder)).stdout
        assert f"step {SAVED + 1}/{LAST}" in told and f"done at step {LAST} of {LAST}" in told
        made, kept = lines(folder), lines(OLD)
        assert [line["step"] for line in made] == list(range(1, LAST + 1))
        assert [line["loss"] for line in made[SAVED:]] == pytest.approx(
            [x["loss"] for x in kept[SAVED:]], abs=1e-6
        )
    a, b = states(theirs), states(ours)
    assert a.keys() == b.keys() and len(a) > 30
    assert [name for name in a if not torch.equal(a[name], b[name])] == []

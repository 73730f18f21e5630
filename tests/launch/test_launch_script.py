"""launch.sh started by hand, without `run`: in a fresh folder, and on nodes whose folders
differ."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shardwright.utils.child_processes import free_port
from tests.launch.resume import compiled
from tests.parity.harness import Case, metrics
from tests.unit.launch.test_current_directory import plant

pytestmark = pytest.mark.launch
TWO = Case(model="llama", data=2, nodes=2, launcher="no_ssh")


def start(folder: Path, where: Path, port: int, **env: str) -> subprocess.Popen[str]:
    """launch.sh, from the directory `where`."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.Popen(
        ["bash", str(folder / "launch.sh")],
        cwd=where,
        env={**os.environ, "PATH": path, "MASTER_PORT": str(port), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_one_rank_in_a_fresh_folder_from_a_hostile_directory(tmp_path: Path) -> None:
    """Nobody but rank 0 could make run/, and no module of the current directory is imported by any
    of the processes."""
    out = compiled(Case(model="llama"), tmp_path, steps=4)
    downloads = tmp_path / "downloads"
    downloads.mkdir()
    plant(downloads)
    process = start(out, downloads, free_port())
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output[-3000:]
    assert json.loads((out / "run" / "status.json").read_text())["status"] == "done"
    assert [m["step"] for m in metrics(out)] == [1, 2, 3, 4]
    assert not (downloads / "pwned").exists()


@pytest.mark.prove
def test_nodes_with_other_plans_train_no_step(tmp_path: Path) -> None:
    """One folder each, as without a shared file system: a's has the recipe's learning rate, b's a
    hundredth of it."""
    out = compiled(TWO, tmp_path)
    other = tmp_path / "other"
    shutil.copytree(out, other)
    plan = (other / "plan.json").read_text()
    assert '"lr": 0.001' in plan
    (other / "plan.json").write_text(plan.replace('"lr": 0.001', '"lr": 0.00001'))
    port, shared = (
        free_port(),
        {"MASTER_ADDR": "127.0.0.1", "SHARDWRIGHT_TOKEN": "the same on both"},
    )
    nodes = [
        start(f, tmp_path, port, NODE_RANK=str(n), **shared) for n, f in enumerate((out, other))
    ]
    for process in nodes:
        output, _ = process.communicate(timeout=120)
        assert process.returncode != 0
        assert "has a different plan.json" in output, output[-3000:]
    assert not (out / "run" / "metrics.jsonl").exists()

"""A run whose folder is on a disk that fills up while it trains."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parity.harness import Case, must, recipe, shardwright, write_inputs

pytestmark = pytest.mark.launch

ON_A_SMALL_DISK = Path(__file__).resolve().parents[1] / "faults" / "on_a_small_disk.py"
PAGE = 4096


@pytest.mark.prove
def test_a_full_disk_ends_the_run_and_is_named(tmp_path: Path) -> None:
    """First with room for some steps: the metrics or the launcher's log fill the disk."""
    case = Case(model="llama", data=2, pretrained=True)  # random weights would pass through run/
    write_inputs(case, tmp_path)
    document = recipe(case, tmp_path)
    document["training"]["steps"] = 200
    document["checkpoint"] = {"every_steps": 200}
    (tmp_path / "recipe.yaml").write_text(json.dumps(document))
    out = tmp_path / "out"
    must(shardwright("compile", tmp_path / "recipe.yaml", "-o", out))
    run = out / "run"
    line = f"'{sys.executable}' -m shardwright"
    commands = f"{line} run '{out}'; echo ended $?; {line} status '{out}' --json; exit 0"
    small, large = str(16 * PAGE), str(2**24)
    done = subprocess.run(
        [sys.executable, ON_A_SMALL_DISK, run, small, large, "bash", "-c", commands],
        capture_output=True,
        text=True,
        timeout=500,
    )
    if "Operation not permitted" in done.stderr:
        pytest.skip("no mounts of its own")
    lines = done.stdout.splitlines()
    ends = [line for line in lines if line.startswith("ended ")]
    states = [json.loads(line) for line in lines if line.startswith('{"status"')]
    assert ends == ["ended 3", "ended 0"], done.stdout[-2000:] + done.stderr[-3000:]
    assert "error[SW6323]: " in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert f"No space left on device (the file system at {run})" in done.stderr
    assert "standard output" not in done.stderr and "our fault" not in done.stderr
    first, second = states
    assert first["status"] == "failed" and str(run) in first["cause"]
    assert second["status"] == "done" and second["attempts"][0]["end"]["code"] == "SW6323"

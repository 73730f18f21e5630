"""launch.sh on each node by itself, without `shardwright run`: rank 0 chooses the checkpoint, and
all go on from it."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from shardwright.utils.child_processes import free_port, program_path
from tests.parity.harness import (
    Case,
    metrics,
    must,
    newest_checkpoint,
    recipe,
    shardwright,
    write_inputs,
)

pytestmark = pytest.mark.launch
STEPS = 40


def start(out: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["bash", str(out / "launch.sh")],
        env={
            **os.environ,
            "PATH": program_path(),
            "NODE_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "SHARDWRIGHT_PREEMPTED_EXIT": "75",  # as a Kubernetes pod has it
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.prove
def test_a_node_that_is_started_again_goes_on(tmp_path: Path) -> None:
    case = Case(model="llama", data=2)
    write_inputs(case, tmp_path)
    document = recipe(case, tmp_path)
    document["training"]["steps"] = STEPS
    document["data"] = {"kind": "synthetic"}
    document["launch"] = {"launcher": "no_ssh"}
    (tmp_path / "recipe.yaml").write_text(json.dumps(document))
    out = tmp_path / "out"
    must(shardwright("compile", tmp_path / "recipe.yaml", "-o", out))

    process = start(out)
    end = time.monotonic() + 200
    while not ((out / "run" / "metrics.jsonl").exists() and len(metrics(out)) > 2):
        assert process.poll() is None and time.monotonic() < end, "it never trained"
        time.sleep(0.2)
    (out / "run" / "stop").touch()
    printed, _ = process.communicate(timeout=200)
    assert process.returncode == 75, printed[-2000:]
    stopped = int(newest_checkpoint(out).name.removeprefix("step-"))
    assert 2 < stopped < STEPS

    process = start(out)
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0, printed[-2000:]
    assert [line["step"] for line in metrics(out)] == list(range(1, STEPS + 1))
    assert {line["attempt"] for line in metrics(out) if line["step"] > stopped} == {2}
    status = json.loads((out / "run" / "status.json").read_text())
    assert (status["status"], status["attempt"]) == ("done", 2)

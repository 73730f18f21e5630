"""A run without a terminal: --detach, status, logs, stop; and a run that does not move."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launch.resume import compiled
from tests.launch.wait_until import wait_for, wait_until
from tests.parity.harness import Case, metrics, must, newest_checkpoint, shardwright

pytestmark = pytest.mark.launch


def status(out: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(must(shardwright("status", out, "--json")).stdout)
    return document


def test_a_detached_run_outlives_its_terminal_and_stops_with_a_checkpoint(tmp_path: Path) -> None:
    out = compiled(Case(model="llama", data=2), tmp_path, steps=4000)
    assert status(out)["status"] == "not started"
    refused = shardwright("stop", out)
    assert (refused.returncode, "error[SW6304]" in refused.stderr) == (1, True)

    terminal = subprocess.Popen(
        [sys.executable, "-m", "shardwright", "run", str(out), "--detach"],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    told, _ = terminal.communicate(timeout=60)
    assert terminal.returncode == 0 and f"shardwright stop {out}" in told
    with pytest.raises(ProcessLookupError):
        os.killpg(terminal.pid, signal.SIGHUP)  # nobody is left in the terminal's group

    wait_until(lambda: status(out)["step"] > 2, "no steps", 120)
    running = status(out)
    assert (
        running["status"] == "running" and running["loss"] > 0 and running["tokens_per_second"] > 0
    )
    assert running["eta_seconds"] > 0
    assert "error[SW6006]" in shardwright("run", out).stderr
    assert "error[SW6006]" in shardwright("run", out, "--detach").stderr

    following = subprocess.Popen(
        [sys.executable, "-m", "shardwright", "logs", str(out), "-f"],
        stdout=subprocess.PIPE,
        text=True,
    )
    stopped = must(shardwright("stop", out))
    assert "preempted at step" in stopped.stdout
    assert newest_checkpoint(out).name == f"step-{status(out)['step']:08d}"
    assert status(out)["status"] == "preempted"
    shown, _ = following.communicate(timeout=60)
    assert '"step": 3,' in shown
    assert (
        "rank 1: connecting to the other ranks"
        in must(shardwright("logs", out, "--rank", "1")).stdout
    )
    assert "error[SW6305]" in shardwright("logs", out, "--rank", "2").stderr
    assert "preempted at step" in (out / "run" / "logs" / "run.log").read_text()


@pytest.mark.prove
def test_the_rank_that_all_wait_for_is_named(tmp_path: Path) -> None:
    out = compiled(Case(model="llama", pipeline=2), tmp_path)
    script = out / "train.py"
    script.write_text(
        "import os, time, shardwright.engines.deepspeed.deepspeed_trainers as engine\n"
        "whole = engine.PipelineTrainer.step\n"
        "def step(self, *a):\n"
        "    if os.environ['RANK'] == '1' and self.engine.global_steps == 2:\n"
        "        time.sleep(3600)\n"
        "    return whole(self, *a)\n"
        "engine.PipelineTrainer.step = step\n" + script.read_text()
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "shardwright", "run", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "SHARDWRIGHT_STALL_SECONDS": "15"},
    )
    wait_for(lambda: bool(status(out)["stalled"]), process)
    state = status(out)
    assert (state["status"], state["rank"], state["stage"], state["step"]) == ("running", 1, 1, 2)
    assert "rank 1 on" in state["stalled"] and "in step 3, at" in state["stalled"]
    assert "waits in no collective" in state["stalled"]
    stacks = [(out / "run" / "ranks" / f"rank-{rank:05d}.stack").read_text() for rank in (0, 1)]
    assert "distributed_c10d.py" in stacks[0] and "in step" in stacks[1]
    process.send_signal(signal.SIGINT)
    told, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "warning[SW6303]: no step for 15 s: rank 1 on" in told
    assert metrics(out)[-1]["step"] == 2

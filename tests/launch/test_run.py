"""`run`: resume, preemption, failures, and what it prints and leaves behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from shardwright.launch import launcher_process
from shardwright.launch.run_state import HEARTBEAT_LOST_SECONDS
from shardwright.utils import run_lease
from shardwright.utils.child_processes import free_port
from tests.launch.resume import compiled, continues_bit_for_bit
from tests.launch.wait_until import wait_for, wait_until
from tests.parity.harness import Case, metrics, must, newest_checkpoint, shardwright

pytestmark = pytest.mark.launch


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            Case(model="gpt2-dropout", pipeline=2, tensor=2, checkpointing="full"),
            marks=pytest.mark.prove,
        ),
        pytest.param(Case(model="llama", data=2, zero_stage=3), marks=pytest.mark.prove),
    ],
    ids=["gpt2-dropout-pp2-tp2", "llama-dp2-zero3"],
)
def test_a_run_that_lost_its_last_steps_continues_bit_for_bit(case: Case, tmp_path: Path) -> None:
    continues_bit_for_bit(case, tmp_path)
    done = must(shardwright("run", tmp_path / "out"))
    assert "already trained" in done.stdout


def test_stop_file_saves_and_a_later_run_finishes(tmp_path: Path) -> None:
    case = Case(model="llama", pipeline=2)
    out = compiled(case, tmp_path, steps=400)
    process = subprocess.Popen(
        [sys.executable, "-m", "shardwright", "run", str(out)], stdout=subprocess.PIPE, text=True
    )
    wait_for(lambda: (out / "run" / "metrics.jsonl").exists() and len(metrics(out)) > 2, process)
    (out / "run" / "stop").touch()
    assert process.wait(timeout=120) == 0
    status = json.loads((out / "run" / "status.json").read_text())
    assert status["status"] == "preempted"
    assert newest_checkpoint(out).name == f"step-{status['step']:08d}"
    assert len(metrics(out)) == status["step"]


@pytest.mark.parametrize(
    "receiver",
    [
        "every process",
        pytest.param("rank 1", marks=pytest.mark.prove),
        pytest.param("launch.sh", marks=pytest.mark.prove),
    ],
)
def test_sigterm_saves_and_stops(receiver: str, tmp_path: Path) -> None:
    """Send it as Slurm, systemd and others do: to all processes, or to one. DeepSpeed's launcher
    is not to end the ranks."""
    out = compiled(Case(model="llama", data=2), tmp_path, steps=4000)
    process = subprocess.Popen(
        [sys.executable, "-m", "shardwright", "run", str(out)], stdout=subprocess.PIPE, text=True
    )
    wait_for(lambda: (out / "run" / "metrics.jsonl").exists() and len(metrics(out)) > 2, process)
    started = psutil.Process(process.pid).children(recursive=True)
    rank = json.loads((out / "run" / "ranks" / "rank-00001.json").read_text())["pid"]
    receivers = {"every process": [each.pid for each in started], "rank 1": [rank]}
    assert rank in receivers["every process"]
    for pid in receivers.get(receiver, [started[0].pid]):
        os.kill(pid, signal.SIGTERM)
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 0, printed
    status = json.loads((out / "run" / "status.json").read_text())
    assert status["status"] == "preempted"
    assert newest_checkpoint(out).name == f"step-{status['step']:08d}"
    assert [line["step"] for line in metrics(out)] == [*range(1, status["step"] + 1)]


@pytest.mark.prove
def test_a_run_whose_port_is_taken_starts_again_and_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also where `run` has no heartbeat in between, which would take its lease back."""
    out = compiled(Case(model="llama", data=2), tmp_path, steps=4)
    monkeypatch.setattr(run_lease, "LEASE_HEARTBEAT_SECONDS", 600.0)
    with socket.create_server(("", 0)) as other:
        ports = iter([other.getsockname()[1]])
        monkeypatch.setattr(launcher_process, "free_port", lambda: next(ports, free_port()))
        code = launcher_process.run_folder(out, None, "auto")
    printed = capfd.readouterr().out
    assert "another process took the run's port: starting again" in printed
    assert code == 0 and "done at step 4 of 4" in printed
    status = json.loads((out / "run" / "status.json").read_text())
    assert (status["status"], status["attempt"]) == ("done", 2)
    ends = [json.loads(line) for line in (out / "run" / "attempts.jsonl").read_text().splitlines()]
    assert {line["attempt"] for line in ends} == {1, 2}
    assert [line["step"] for line in metrics(out)] == [1, 2, 3, 4]


@pytest.mark.prove
def test_an_interrupt_ends_every_rank(tmp_path: Path) -> None:
    out = compiled(Case(model="llama", data=2), tmp_path, steps=400)
    process = subprocess.Popen(
        [sys.executable, "-m", "shardwright", "run", str(out)],
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(lambda: (out / "run" / "metrics.jsonl").exists() and len(metrics(out)) > 2, process)
    pids = [json.loads(p.read_text())["pid"] for p in (out / "run" / "ranks").iterdir()]
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert len(pids) == 2
    gone_by = (
        time.monotonic() + 30
    )  # the launcher has told them to end; a busy machine takes its time
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < gone_by, "a rank outlived its run"
        time.sleep(0.2)
    status = json.loads((out / "run" / "status.json").read_text())
    assert (status["status"], status["cause"]) == ("failed", "interrupted")


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    out = compiled(Case(model="llama", data=2), tmp_path, steps=400)
    process = subprocess.Popen(
        [sys.executable, "-m", "shardwright", "run", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(lambda: (out / "run" / "metrics.jsonl").exists() and len(metrics(out)) > 2, process)
    victim = json.loads((out / "run" / "ranks" / "rank-00001.json").read_text())
    os.kill(victim["pid"], signal.SIGKILL)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 3
    assert "error[SW6301]: rank 1 (stage 0, host " in errors and "killed (signal 9)" in errors
    assert "Traceback" not in errors
    status = json.loads((out / "run" / "status.json").read_text())
    assert (status["status"], status["rank"]) == ("failed", 1)


@pytest.mark.prove
def test_no_rank_outlives_a_run_that_was_killed(tmp_path: Path) -> None:
    """`run` cannot do anything any more: the ranks see that nobody reads what the launcher says."""
    out = compiled(Case(model="llama", data=2), tmp_path, steps=4000)
    process = subprocess.Popen([sys.executable, "-m", "shardwright", "run", str(out)], text=True)
    wait_for(lambda: (out / "run" / "metrics.jsonl").exists() and len(metrics(out)) > 2, process)
    pids = [json.loads(p.read_text())["pid"] for p in (out / "run" / "ranks").glob("*.json")]
    assert len(pids) == 2
    process.kill()
    process.wait()
    wait_until(
        lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "a rank outlived its run"
    )
    # Where the launcher ends rank 0 before that can say why it ends, its heartbeat is what tells.
    seconds = HEARTBEAT_LOST_SECONDS + 10
    wait_until(
        lambda: json.loads(shardwright("status", out, "--json").stdout)["status"] == "failed",
        "alive?",
        seconds,
    )


@pytest.mark.prove
def test_a_failing_rank_speaks_before_its_echo(tmp_path: Path) -> None:
    """Rank 1 cannot read its copy of the script's model folder: its own error is shown, not gloo's
    on rank 0."""
    out = compiled(Case(model="llama", pipeline=2), tmp_path)
    script = out / "train.py"
    script.write_text(
        "import os, shardwright.engines.deepspeed.deepspeed_trainers as engine\n"
        "whole = engine.PipelineTrainer.step\n"
        "def step(self, *a):\n"
        "    if os.environ['RANK'] == '1' and self.engine.global_steps == 2:\n"
        "        raise OSError('the disk went away')\n"
        "    return whole(self, *a)\n"
        "engine.PipelineTrainer.step = step\n" + script.read_text()
    )
    result = shardwright("run", out)
    assert result.returncode == 3
    assert "error[SW6301]: rank 1 (stage 1" in result.stderr
    assert "OSError: the disk went away" in result.stderr
    assert json.loads((out / "run" / "status.json").read_text())["rank"] == 1


def test_data_that_does_not_fit_is_refused_with_its_code(tmp_path: Path) -> None:
    out = compiled(Case(model="llama", data=2), tmp_path)
    np.save(tmp_path / "tokens.npy", np.full((64, 32), 300, dtype=np.int32))
    result = shardwright("run", out)
    assert result.returncode == 1
    assert "error[SW6105]" in result.stderr
    assert "token id 300" in result.stderr
    assert "Traceback" not in result.stderr


def test_exit_code_zero_without_the_marker_is_no_success(tmp_path: Path) -> None:
    """`deepspeed` exits 0 when its launch.py dies by a signal: only the marker is believed."""
    out = compiled(Case(model="llama"), tmp_path)
    (out / "train.py").write_text("raise SystemExit(0)\n")
    result = shardwright("run", out)
    assert result.returncode == 3
    assert "no rank reported an error" in result.stderr

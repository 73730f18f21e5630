"""What `run` says about a run that did not finish, from what its launcher's output holds."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwright.compile.recipe_compiler import compile_recipe
from shardwright.launch import launcher_process
from shardwright.launch.run_state import port_was_taken, report_failure
from shardwright.monitor.rank_events import EVENT_PREFIX
from shardwright.monitor.run_files import PROGRESS
from shardwright.plan.plan import Plan
from shardwright.recipe.recipe_loader import load_recipe


@pytest.fixture
def plan(write_recipe: Callable[..., Path]) -> Plan:
    return compile_recipe(load_recipe(write_recipe())).plan


def reported(
    plan: Plan, folder: Path, log: str, launcher_code: int = 1
) -> tuple[int, dict[str, object]]:
    (folder / "run").mkdir()
    (folder / "run" / "launcher.log").write_text(log)
    code = report_failure(plan, folder, 1, launcher_code)
    return code, json.loads((folder / "run" / "status.json").read_text())


LOST = EVENT_PREFIX + json.dumps({"kind": "lost", "rank": 2, "host": "b", "stage": 1, "pid": 7})
KILLED = "b: [2026-01-01] ['train.py', '--local_rank=1'] exits with return code = -9"


def test_the_signal_and_the_rank_come_from_two_witnesses(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """DeepSpeed's launcher knows the signal and prints the last rank's command; the line to rank 0
    knows the rank."""
    code, status = reported(plan, tmp_path, f"a: {LOST}\n{KILLED}\n")
    assert code == 3
    assert (status["rank"], status["host"], status["stage"]) == (2, "b", 1)
    assert "rank 2 (stage 1, host b): killed (signal 9)" in capsys.readouterr().err


def test_a_host_that_was_switched_off(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, status = reported(plan, tmp_path, f"a: {LOST}\npdsh@a: b: ssh exited with exit code 255\n")
    assert "lost power or network" in str(status["cause"])
    assert "rank 2 (stage 1, host b)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("", "was ended while the run started: killed (signal 9)"),
        (f"{PROGRESS}{{}}\n", "was ended: killed (signal 9)"),
    ],
)
def test_an_engine_without_a_launcher_ends_with_its_only_rank(
    plan: Plan, tmp_path: Path, log: str, words: str
) -> None:
    _, status = reported(plan, tmp_path, log, launcher_code=-9)
    assert words in str(status["cause"])


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (
            (
                "b: ssh: connect to host b port 22: No route\npdsh@a: b: ssh exited with exit "
                "code 255\n"
            ),
            "host b: ssh cannot connect",
        ),
        (
            f"{KILLED}\npdsh@a: b: ssh exited with exit code 247\n",
            "a rank on host b was ended while the run started",
        ),
        (
            "b: No module named shardwright\npdsh@a: b: ssh exited with exit code 1\n",
            "`deepspeed` on host b ended",
        ),
        (
            "RuntimeError: Using hostfile at /h but host=b was not reachable via ssh. If you\n",
            "host b: ssh cannot connect",
        ),
        ("nothing of use\n", "no rank reported an error"),
    ],
)
def test_no_rank_could_speak(
    log: str, words: str, plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, status = reported(plan, tmp_path, log)
    assert (code, status["status"]) == (3, "failed")
    error = capsys.readouterr().err
    assert words in error and log.splitlines()[0] in error


def test_out_of_memory_says_what_was_predicted_and_what_needs_less(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    event = {
        "kind": "failed",
        "rank": 1,
        "host": "a",
        "stage": 0,
        "code": "SW6301",
        "traceback": "",
    }
    cause = "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    code, _ = reported(plan, tmp_path, EVENT_PREFIX + json.dumps({**event, "cause": cause}))
    error = capsys.readouterr().err
    assert code == 3
    assert f"{plan.predicted.memory.peak_bytes / 2**30:.1f} of " in error
    assert "--set parallelism.activation_checkpointing=full" in error


def test_refused_input_is_no_broken_run(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    event = {
        "kind": "failed",
        "rank": 0,
        "host": "a",
        "stage": 0,
        "code": "SW6105",
        "cause": "token id 300",
        "help": "h",
    }
    code, _ = reported(plan, tmp_path, EVENT_PREFIX + json.dumps(event))
    assert code == 1
    assert "error[SW6105]: token id 300" in capsys.readouterr().err


@pytest.mark.parametrize("code", ["SW6205", "SW6210", "SW6311"])
def test_a_checkpoint_that_is_refused_ends_a_run_that_had_begun(
    code: str, plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = {
        "kind": "failed",
        "rank": 1,
        "host": "a",
        "stage": 0,
        "code": code,
        "cause": "why",
        "help": "what now",
    }
    exit_code, status = reported(plan, tmp_path, EVENT_PREFIX + json.dumps(refused))
    assert (exit_code, status["status"], status["code"], status["cause"]) == (
        3,
        "failed",
        code,
        "why",
    )
    assert status["help"] == "what now"
    assert capsys.readouterr().err == f"error[{code}]: why\n  what now\n"


@pytest.mark.parametrize(
    ("rank", "code", "port", "taken"),
    [
        (0, "SW6302", None, True),
        (0, "SW6302", 29500, False),
        (1, "SW6302", None, False),
        (0, "SW6301", None, False),
    ],
)
def test_a_port_that_somebody_took_meanwhile(
    plan: Plan, tmp_path: Path, rank: int, code: str, port: int | None, taken: bool
) -> None:
    event = {
        "kind": "failed",
        "rank": rank,
        "host": "a",
        "stage": 0,
        "code": code,
        "cause": "c",
        "help": "h",
    }
    (tmp_path / "launcher.log").write_text(EVENT_PREFIX + json.dumps(event))
    chosen = dataclasses.replace(plan, launch=dataclasses.replace(plan.launch, master_port=port))
    assert port_was_taken(chosen, tmp_path) is taken


@pytest.mark.parametrize(
    "line",
    [
        "srun: error: n1: task 0: Exited with exit code 1",
        "srun: error: n[1-2]: tasks 0-3,5: Killed",
    ],
)
def test_srun_does_not_wait_for_a_lost_node(
    line: str, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """srun says which rank failed, and goes on waiting for the node that does not answer."""
    monkeypatch.setattr(launcher_process, "TASK_GRACE_SECONDS", 0.2)
    (tmp_path / "run").mkdir()
    command = ["bash", "-c", f"echo '{line}'; exec sleep 60"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    began = time.monotonic()
    launcher_process._stream(process, plan, tmp_path)
    assert process.wait() == -signal.SIGKILL and time.monotonic() - began < 30

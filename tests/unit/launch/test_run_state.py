"""`status`, `logs` and `stop` on folders that runs left."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwright.cli import main as cli
from shardwright.launch.run_state import is_alive
from shardwright.monitor.run_files import write_json
from shardwright.plan.plan import load_plan
from shardwright.train.run_attempt import begin_attempt
from shardwright.utils.json_values import JsonObject

STEP = {"step": 3, "loss": 2.5, "tokens": 100, "step_seconds": 0.5, "attempt": 2}


@pytest.fixture
def out(write_recipe: Callable[..., Path], tmp_path: Path) -> Path:
    assert cli.main(["compile", str(write_recipe()), "-o", str(tmp_path / "out")]) == 0
    (tmp_path / "out" / "run").mkdir()
    return tmp_path / "out"


def status(out: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert cli.main(["status", str(out), "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_a_run_that_nobody_started(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(out, capsys)["status"] == "not started"
    assert cli.main(["status", str(out)]) == 0
    assert f"shardwright run {out}" in capsys.readouterr().out


def test_a_run_that_lives(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = out / "run"
    write_json(run / "attempt.json", {"attempt": 2})
    with (run / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert status(out, capsys)["status"] == "starting"
        write_json(run / "status.json", {"status": "running", "attempt": 2})
        (run / "metrics.jsonl").write_text(json.dumps(STEP) + '\n{"step": 4, "lo')
        found = status(out, capsys)
    assert (found["status"], found["step"], found["steps"], found["attempt"]) == (
        "running",
        3,
        10,
        2,
    )
    assert (found["loss"], found["tokens_per_second"], found["eta_seconds"]) == (2.5, 200.0, 3.5)


def test_a_run_whose_noise_scale_was_measured(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = out / "run"
    write_json(run / "attempt.json", {"attempt": 1})
    write_json(run / "status.json", {"status": "done", "attempt": 1})
    of = {"gradient_square": 2.0, "row_variance": 32.0, "rows": 8}
    lines = [{**STEP, "step": k, "attempt": 1, "noise_scale": of} for k in range(1, 9)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = status(out, capsys)["noise_scale"]
    assert found == {
        "value": 16.0,
        "low": 16.0,
        "high": 16.0,
        "steps": 4,
        "rows": 8,
        "batch": 8,
        "step": 8,
    }
    assert cli.main(["status", str(out)]) == 0
    assert "noise    your batch is 0.5 to 0.5 of the noise scale: " in capsys.readouterr().out


def test_a_run_without_a_finite_loss(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = out / "run"
    write_json(run / "attempt.json", {"attempt": 1})
    write_json(
        run / "status.json",
        {"status": "failed", "attempt": 1, "cause": "no number", "help": "lower the rate"},
    )
    line = {**STEP, "attempt": 1, "loss": None, "finite": False}
    (run / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    found = status(out, capsys)
    assert (found["step"], found["loss"], found["finite"], found["help"]) == (
        3,
        None,
        False,
        "lower the rate",
    )
    assert cli.main(["status", str(out)]) == 0
    printed = capsys.readouterr().out
    assert (
        "loss     nan\n" in printed and "cause    no number\nhelp     lower the rate\n" in printed
    )


def test_a_run_whose_machine_went_down_did_not_finish(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = out / "run"
    write_json(run / "attempt.json", {"attempt": 1})
    write_json(run / "status.json", {"status": "running", "attempt": 1})
    (run / "lock").touch()
    (run / "heartbeat").touch()
    assert status(out, capsys)["status"] == "running"  # started otherwise than by `run`
    old = time.time() - 3600
    os.utime(run / "heartbeat", (old, old))
    found = status(out, capsys)
    assert (found["status"], found["eta_seconds"]) == ("failed", None)
    assert "without an error message" in found["cause"]
    assert cli.main(["stop", str(out)]) == 1
    assert "error[SW6304]" in capsys.readouterr().err
    assert not (run / "stop").exists()


@pytest.mark.parametrize("ended", ["done", "preempted", "failed"])
def test_a_run_that_has_ended_is_not_alive_because_its_heart_beat_a_moment_ago(
    out: Path, ended: str
) -> None:
    run = out / "run"
    write_json(run / "attempt.json", {"attempt": 1})
    (run / "lock").touch()
    (run / "heartbeat").touch()
    write_json(run / "status.json", {"status": "running", "attempt": 1})
    assert is_alive(out)
    write_json(run / "status.json", {"status": ended, "attempt": 1})
    assert not is_alive(out)


def test_an_attempt_that_died_early_does_not_show_the_steps_of_the_one_before(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = out / "run"
    lines = [{**STEP, "step": step, "attempt": 1} for step in range(1, 8)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_json(run / "status.json", {"status": "failed", "attempt": 2})
    for resume, step in ((None, 0), ("/elsewhere/checkpoints/step-00000005", 5)):
        write_json(run / "attempt.json", {"attempt": 2, "resume": resume, "steps": 10})
        assert status(out, capsys)["step"] == step
    write_json(run / "attempt.json", {"attempt": 1, "resume": None, "steps": 7})
    found = status(out, capsys)  # compiled again for more steps or fewer: 7 of 7 were trained
    assert (found["step"], found["steps"]) == (7, 7)


def test_status_counts_the_steps_of_the_attempt_not_of_a_later_compile(
    out: Path, write_recipe: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    begin_attempt(load_plan(out), out, None, fresh=False)  # of 10 steps
    lines = [{**STEP, "step": step, "attempt": 1} for step in range(1, 11)]
    (out / "run" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_json(out / "run" / "status.json", {"status": "done", "attempt": 1})
    assert cli.main(["compile", str(write_recipe({"training.steps": 7})), "-o", str(out)]) == 0
    found = status(out, capsys)
    assert (found["step"], found["steps"]) == (10, 10)


def test_a_failure_says_where_and_what_next(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where: JsonObject = {"rank": 3, "host": "b\x1b[31m", "stage": 1, "cause": "killed"}
    write_json(out / "run" / "attempt.json", {"attempt": 1})
    write_json(out / "run" / "status.json", {"status": "failed", "attempt": 1, **where})
    assert cli.main(["status", str(out)]) == 0
    text = capsys.readouterr().out
    assert "rank 3, stage 1, host b" in text and "\x1b" not in text
    assert f"shardwright logs {out} --rank 3" in text


def test_a_second_interrupt_leaves_the_stopping_run_alone(
    out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shardwright.cli.launch_commands._wait", interrupted)
    with (out / "run" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert cli.main(["stop", str(out)]) == 130
    assert (out / "run" / "stop").exists()
    assert capsys.readouterr().err.splitlines() == [
        "still waiting for the checkpoint; interrupt again to leave it alone",
        "no longer waiting; the run ends by itself",
    ]


def test_logs_of_a_rank_and_of_none(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (out / "run" / "logs").mkdir()
    (out / "run" / "logs" / "rank-00001.log").write_text("here is rank 1\n")
    assert cli.main(["logs", str(out), "--rank", "1"]) == 0
    assert "here is rank 1" in capsys.readouterr().out
    for rank, words in (
        ("2", "line 1 of the hostfile"),
        ("4", "ranks 0 to 3"),
        ("0", "launcher.log"),
    ):
        assert cli.main(["logs", str(out), "--rank", rank]) == 1
        error = capsys.readouterr().err
        assert "error[SW6305]" in error and words in error

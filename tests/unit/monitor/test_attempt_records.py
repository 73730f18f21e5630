"""Why attempts ended, and what they cost, from a run's files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwright.monitor.attempt_records import (
    AttemptSummary,
    attempt_summaries,
    discarded_seconds,
    end_cause,
    run_cost,
)
from shardwright.monitor.run_files import read_json, refresh_attempts, write_status

FAILED = {"outcome": "failed", "code": "SW6301", "cause": "killed (signal 9)"}


@pytest.mark.parametrize(
    ("end", "lost", "cause"),
    [
        ({"outcome": "done"}, ["b"], "done"),
        ({"outcome": "preempted"}, [], "preemption"),
        ({"outcome": "preempted", "stop_requested": True}, [], "stopped"),
        ({"outcome": "failed", "cause": "interrupted", "code": None}, [], "stopped"),
        (FAILED, [], "rank"),
        (FAILED, ["b"], "host"),
        ({"outcome": "lost"}, [], "rank"),
        ({**FAILED, "code": "SW6303"}, [], "hang"),
        ({**FAILED, "code": "SW6303"}, ["b"], "hang"),
        ({**FAILED, "code": "SW6311"}, [], "nonfinite"),
        ({**FAILED, "code": "SW6302"}, [], "rank"),
        ({**FAILED, "code": "SW6205", "cause": "No space left on device"}, [], "disk"),
        ({**FAILED, "cause": "OSError: [Errno 28] No space left on device"}, [], "disk"),
        ({**FAILED, "code": "SW6205", "cause": "Stale file handle"}, [], "rank"),
        ({**FAILED, "code": "SW6011"}, [], "refused"),
        ({**FAILED, "code": "SW6216"}, [], "refused"),
    ],
)
def test_causes(end: dict[str, Any], lost: list[str], cause: str) -> None:
    assert end_cause(end, lost) == cause


def write_run(folder: Path) -> None:
    """Attempt 1 trains steps 1 to 5 and is lost; 2 never trains; 3 goes on from step 4."""
    run = folder / "run"
    run.mkdir()
    steps = [(k, 1, 100.0 + k) for k in range(1, 5)] + [(5, 3, 134.0), (6, 3, 135.0)]
    more = {"loss": 1.0, "grad_norm": 1.0, "learning_rate": 1e-3, "tokens_per_second": 9.0}
    lines = [
        {"step": step, "attempt": attempt, "time": time, "step_seconds": 1.0, **more}
        for step, attempt, time in steps
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    own = {"layout": "data=3", "nodes": 3}
    end = {**FAILED, "event": "end", "step": 5, "rank": 1, "host": "b"}
    events: list[dict[str, Any]] = [
        {"event": "start", "attempt": 1, "time": 95.0, "step": 0, **own},
        {**end, "attempt": 1, "time": 112.0, "first_step_time": 100.0, "last_step_time": 105.0},
        {"event": "recovery", "attempt": 1, "cause": "host", "host": "b", "action": "fewer"},
        {"event": "start", "attempt": 2, "time": 115.0, "step": 4, "discarded_seconds": 1.0, **own},
        {**end, "attempt": 2, "time": 128.0, "step": 4},
        {"event": "start", "attempt": 3, "time": 130.0, "step": 4, "layout": "data=2", "nodes": 2},
    ]
    (run / "attempts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in events))


def test_summaries_and_costs(tmp_path: Path) -> None:
    write_run(tmp_path)
    first, second, third = attempt_summaries(tmp_path)
    # Step 5 is trained again (1 s), and 10 s pass until the next attempt starts.
    expected = AttemptSummary(
        number=1,
        cause="host",
        host="b",
        rank=1,
        started_step=0,
        ended_step=5,
        seconds_lost=11.0,
        layout="data=3",
        nodes=3,
    )
    assert first == expected
    # It trained nothing: from its start to the first step of the next one.
    assert (second.cause, second.seconds_lost, second.ended_step) == ("rank", 18.0, 4)
    assert (third.cause, third.seconds_lost, third.ended_step, third.nodes) == (None, None, 6, 2)
    cost = run_cost(tmp_path)
    assert cost.restarts == 2 and cost.seconds_lost == {"rank": 18.0, "host": 11.0}
    assert cost.goodput == pytest.approx(6 / 40)
    # 7 s until attempt 1 was ended; attempt 2 started for 13 s, attempt 3 for 3 s.
    assert cost.parts == {"noticing": 7.0, "deciding": 5.0, "starting": 16.0, "repeating": 1.0}
    assert sum(cost.parts.values()) == sum(cost.seconds_lost.values())
    assert discarded_seconds(tmp_path, 4) == 2.0


def test_status_json_has_the_attempts(tmp_path: Path) -> None:
    write_run(tmp_path)
    write_status(tmp_path, "running", 3)
    document = read_json(tmp_path / "run" / "status.json")
    attempts: Any = document["attempts"]
    assert [each["number"] for each in attempts] == [1, 2, 3]
    assert list(attempts[0]) == [
        *("number", "cause", "host", "rank", "started_step", "ended_step"),
        *("seconds_lost", "layout", "nodes"),
    ]
    with (tmp_path / "run" / "attempts.jsonl").open("a") as file:
        file.write(json.dumps({"event": "end", "attempt": 3, "outcome": "done", "step": 6}) + "\n")
    refresh_attempts(tmp_path)
    document = read_json(tmp_path / "run" / "status.json")
    attempts = document["attempts"]
    assert document["status"] == "running" and attempts[2]["ended_step"] == 6


def test_a_run_without_files_costs_nothing(tmp_path: Path) -> None:
    assert attempt_summaries(tmp_path) == []
    assert run_cost(tmp_path).goodput is None

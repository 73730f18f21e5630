"""One page about a run: from the files of attempts that were lost, hung and failed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwright.cli import main as cli
from shardwright.monitor.rank_events import RankFailed, RankLost, RunStalled, event_object
from shardwright.plan.plan import load_plan
from shardwright.supervise.autopsy import autopsy_text, read_autopsy
from tests.unit.monitor.test_attempt_records import write_run

STACK = """Thread 0x1 (most recent call first):
  File "/x/threading.py", line 1 in wait

Thread 0x2 (most recent call first):
  File "/x/torch/distributed/distributed_c10d.py", line 77 in all_reduce
  File "/x/training_session.py", line 5 in train
"""


@pytest.fixture
def out(write_recipe: Callable[..., Path], tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    assert cli.main(["compile", str(write_recipe()), "-o", str(folder)]) == 0
    return folder


def write_log(place: Path, *events: RankFailed | RankLost | RunStalled) -> None:
    place.mkdir(parents=True, exist_ok=True)
    lines = [f"b: @shardwright-event {json.dumps(event_object(event))}\n" for event in events]
    (place / "launcher.log").write_text("".join(lines))


def test_a_failed_rank_and_what_the_others_did(out: Path) -> None:
    write_run(out)
    own = RankFailed(rank=1, host="b", stage=0, cause="KeyError: 7", traceback="f.py\nKeyError: 7")
    peer = RankFailed(rank=0, host="a", stage=0, cause="RuntimeError: Connection closed by peer")
    write_log(out / "run" / "attempts" / "2", peer, own)
    report = read_autopsy(load_plan(out), out)
    assert report.failure["rank"] == 1 and report.failure["message"] == "KeyError: 7"
    assert report.waits == ["rank 0 lost its peer: RuntimeError: Connection closed by peer"]
    assert report.tried == ["after attempt 1 planned again for fewer nodes"]
    assert report.repeated_steps == 1
    text = autopsy_text(report)
    for line in (
        "  attempt 1: steps 1 to 5 on 3 nodes, ended by host (rank 1 host b), 11 s lost",
        "  attempt 2, after step 4: rank 1, host b",
        "    KeyError: 7",
        "  2 restarts, 29 s lost (rank 18 s, host 11 s); 1 steps trained twice; goodput 15%",
    ):
        assert line in text.splitlines(), text
    assert any(line.startswith("  step 5 trains rows ") for line in text.splitlines())


def test_a_hang_names_what_the_others_waited_for(out: Path) -> None:
    run = out / "run"
    (run / "ranks").mkdir(parents=True)
    for rank in (0, 1):
        (run / "ranks" / f"rank-{rank:05d}.stack").write_text(STACK)
    write_log(run, RunStalled(ranks=(1,), text="no step for 600 s: rank 1 on b is in step 3"))
    events = [
        {"event": "start", "attempt": 1, "time": 1.0, "step": 0, "nodes": 1, "layout": "data=2"},
        {
            "event": "end",
            "attempt": 1,
            "outcome": "failed",
            "code": "SW6303",
            "step": 2,
            "rank": 1,
            "host": "b",
        },
    ]
    (run / "attempts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in events))
    report = read_autopsy(load_plan(out), out)
    assert report.failure["message"] == "no step for 600 s: rank 1 on b is in step 3"
    assert report.waits == ["rank 0 waits in all_reduce (distributed_c10d.py:77)"]
    assert any("suspect's stack" in line for line in report.advice)


def test_the_command(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert cli.main(["autopsy", str(out)]) == 0
    told = capsys.readouterr().out
    assert "not started at step 0 of 10" in told and "0 restarts" in told
    write_run(out)
    assert cli.main(["autopsy", str(out), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [each["cause"] for each in document["attempts"]] == ["host", "rank", None]
    assert document["cost"]["seconds_lost"] == {"rank": 18.0, "host": 11.0}
    assert cli.main(["status", str(out), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["seconds_lost"] == {"rank": 18.0, "host": 11.0} and not document["supervised"]
    assert document["attempts"][0]["cause"] == "host"
    assert document["attempts"][0]["start"]["layout"] == "data=3"

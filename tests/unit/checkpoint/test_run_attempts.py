"""The next attempt of a run keeps what the last ones left, also where it is killed at once."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from shardwright.checkpoint.run_attempts import KEPT_ATTEMPTS, layout_text, record_end
from shardwright.cli import main as cli
from shardwright.launch import launcher_process
from shardwright.launch.launcher_process import LauncherEnd
from shardwright.monitor.attempt_records import read_attempts
from shardwright.monitor.run_files import write_json, write_status
from shardwright.plan.plan import Plan, load_plan
from shardwright.train.run_attempt import begin_attempt
from tools.pages.page_commands import ROOT


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A compiled folder."""
    shutil.copytree(ROOT / "tests/cases/llama-pp2-tp2/expected", tmp_path / "out")
    (tmp_path / "out" / "run").mkdir()
    return tmp_path / "out"


@pytest.fixture
def plan(out: Path) -> Plan:
    return load_plan(out)


def test_a_layout_is_told_with_its_context_and_expert_ranks(plan: Plan) -> None:
    assert layout_text(plan) == "tensor=2 pipeline=2 data=1 zero_stage=1"
    many = replace(plan.strategy, context=2, expert=4, data=8, micro_batch_size=3)
    text = "tensor=2 pipeline=2 data=8 zero_stage=1 expert=4 context=2"
    assert layout_text(replace(plan, strategy=many)) == text


def leave(out: Path, number: int) -> None:
    """What an attempt that failed at step 3 leaves."""
    run = out / "run"
    write_status(out, "failed", number, rank=3, host="b", code="SW6301", cause=f"killed {number}")
    write_json(run / "errors" / "rank-00003.json", {"attempt": number})
    write_json(run / "ranks" / "rank-00003.json", {"host": "b", "attempt": number})
    (run / "logs").mkdir(exist_ok=True)
    (run / "logs" / "rank-00003.log").write_text(f"rank 3 of attempt {number}\n")
    (run / "launcher.log").write_text(f"launcher of attempt {number}\n")
    line = json.dumps({"step": 3, "loss": 1.0, "attempt": number}) + "\n"
    (run / "metrics.jsonl").write_text(line)


EVIDENCE = {
    "status.json",
    "launcher.log",
    "errors/rank-00003.json",
    "ranks/rank-00003.json",
    "logs/rank-00003.log",
}


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_the_next_attempt_keeps_what_the_last_one_left(out: Path, plan: Plan) -> None:
    assert begin_attempt(plan, out, None, fresh=False, hosts=["a", "b"]).number == 1
    leave(out, 1)
    record_end(plan, out, 1, 9)
    assert begin_attempt(plan, out, None, fresh=False).number == 2
    assert files(out / "run" / "attempts" / "1") == EVIDENCE
    assert not EVIDENCE & files(out / "run")
    first, second = read_attempts(out)
    assert first["start"]["hosts"] == ["a", "b"] and first["start"]["world_size"] == 4
    ended = {"outcome": "failed", "exit_code": 1, "signal": 9, "code": "SW6301", "rank": 3}
    assert first["end"].items() >= {**ended, "host": "b", "step": 3, "cause": "killed 1"}.items()
    assert first["end"]["hosts"] == ["b"] and first["end"]["time"] >= first["start"]["time"]
    assert (second["attempt"], second["end"]) == (2, None)


def test_an_attempt_whose_end_nobody_saw_gets_its_line(out: Path, plan: Plan) -> None:
    begin_attempt(plan, out, None, fresh=False)
    write_status(out, "running", 1)
    begin_attempt(plan, out, None, fresh=False)
    leave(out, 2)
    begin_attempt(plan, out, None, fresh=False)
    first, second, _ = read_attempts(out)
    assert (first["end"]["outcome"], first["end"]["exit_code"]) == ("lost", None)
    assert (second["end"]["outcome"], second["end"]["cause"]) == ("failed", "killed 2")


def test_ranks_that_write_their_logs_already_keep_them(out: Path, plan: Plan) -> None:
    begin_attempt(plan, out, None, fresh=False)
    leave(out, 1)
    begin_attempt(plan, out, None, fresh=False, keeps_rank_logs=True)
    stay = {"launcher.log", "logs/rank-00003.log"}
    assert files(out / "run" / "attempts" / "1") == EVIDENCE - stay
    assert stay <= files(out / "run")


@pytest.mark.parametrize("renames", range(6))
def test_an_attempt_that_is_killed_between_two_moves_loses_nothing(
    renames: int, out: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_attempt(plan, out, None, fresh=False)
    leave(out, 1)
    rename, left = Path.rename, iter(range(renames))

    def killed(path: Path, to: Path) -> Path:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return rename(path, to)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        if renames < len(EVIDENCE):
            with pytest.raises(KeyboardInterrupt):
                begin_attempt(plan, out, None, fresh=False)
        else:
            begin_attempt(plan, out, None, fresh=False)
    leave(out, 1 + (renames >= len(EVIDENCE)))  # files of the same names appear again
    begin_attempt(plan, out, None, fresh=False)
    kept = [path for path in (out / "run" / "attempts").rglob("*") if path.is_file()]
    causes = [json.loads(p.read_text())["cause"] for p in kept if p.name.startswith("status.json")]
    assert Counter(p.name.partition(".")[0] for p in kept)["launcher"] >= 1
    assert "killed 1" in causes
    assert [each["end"]["outcome"] for each in read_attempts(out)[:-1]] == ["failed"] * (
        1 + (renames >= len(EVIDENCE))
    )


def test_the_first_and_the_newest_are_kept_and_others_named(
    out: Path, plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(1, KEPT_ATTEMPTS + 4):
        begin_attempt(plan, out, None, fresh=False)
        leave(out, number)
    kept = sorted(int(path.name) for path in (out / "run" / "attempts").iterdir())
    assert kept == [1, *range(4, KEPT_ATTEMPTS + 3)]
    told = capsys.readouterr().err
    assert "removed run/attempts/2: " in told and "removed run/attempts/3: " in told
    assert len(read_attempts(out)) == KEPT_ATTEMPTS + 3


def test_a_half_written_line_and_a_lost_number(out: Path, plan: Plan) -> None:
    begin_attempt(plan, out, None, fresh=False)
    with (out / "run" / "attempts.jsonl").open("a") as file:
        file.write('{"event": "end", "att')
    (out / "run" / "attempt.json").write_text("")
    assert begin_attempt(plan, out, None, fresh=False).number == 2
    assert [each["attempt"] for each in read_attempts(out)] == [1, 2]


def test_run_and_status_of_several_attempts(
    out: Path,
    write_recipe: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.rmtree(out)
    assert cli.main(["compile", str(write_recipe()), "-o", str(out)]) == 0

    def launch(plan: Plan, folder: Path, *_: object) -> LauncherEnd:
        event = {"kind": "failed", "rank": 1, "host": "a", "code": "SW6301", "cause": "no memory"}
        line = f"@shardwright-event {json.dumps(event)}\nx exits with return code = -9\n"
        (folder / "run" / "launcher.log").write_text(line)
        return LauncherEnd(1)

    monkeypatch.setattr(launcher_process, "_launch", launch)
    assert [cli.main(["run", str(out)]) for _ in range(3)] == [3, 3, 3]
    assert (out / "run" / "attempts" / "2" / "launcher.log").is_file()
    capsys.readouterr()
    assert cli.main(["status", str(out)]) == 0
    wanted = "2 earlier; attempt 2 failed at step 0 (SW6301, rank 1): no memory; run/attempts/2"
    assert f"attempts {wanted}\n" in capsys.readouterr().out
    assert cli.main(["status", str(out), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [each["end"]["signal"] for each in document["attempts"]] == [9, 9, 9]
    assert document["earlier"] == wanted

"""The supervisor's loop, with attempts and hosts that are told to it."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from shardwright.cli import main as cli
from shardwright.cli.launch_commands import read_hostfile
from shardwright.diagnostics import Refusal
from shardwright.launch.launcher_process import Supervision
from shardwright.monitor.attempt_records import read_attempts
from shardwright.monitor.run_files import (
    AttemptRecord,
    read_attempt_record,
    read_json,
    write_attempt_record,
)
from shardwright.monitor.skipped_batches import read_skipped_batches
from shardwright.plan.plan import load_plan
from shardwright.supervise import reachable_hosts, supervisor
from shardwright.train.run_attempt import (
    RANKS,
    SUPERVISOR_STOP,
    begin_attempt,
    read_attempt,
)
from shardwright.utils.json_lines import append_line
from shardwright.utils.run_lease import current_process_owner

LOST = {"outcome": "failed", "code": "SW6301", "cause": "lost without an error message: x"}
DONE = {"outcome": "done", "step": 10}
HOSTS = "a slots=2\nb slots=2\ns slots=2\n"


class Attempts:
    """Stands for `run`: each call ends as the next of `ends` says."""

    def __init__(self, *ends: dict[str, Any]) -> None:
        self.ends: Iterator[dict[str, Any]] = iter(ends)
        self.calls: list[tuple[str, str, str]] = []
        self.ended_ranks: list[str | None] = []

    def run(
        self, folder: Path, hostfile: Path | None, resume: str, supervision: Supervision
    ) -> int:
        named = "" if hostfile is None else hostfile.read_text().replace(" slots=2\n", " ").strip()
        self.calls.append((folder.name, named, resume))
        self.ended_ranks.append(supervision.ended_ranks)
        number = (read_attempt_record(folder).number or 0) + 1
        write_attempt_record(folder, AttemptRecord(number=number))
        lines = folder / "run" / "attempts.jsonl"
        append_line(lines, {"event": "start", "attempt": number, "time": 1.0, "step": 0})
        end = next(self.ends)
        then: Callable[[Supervision], None] | None = end.pop("then", None)
        if then is not None:
            then(supervision)
        code = end.pop("exit", 0 if end["outcome"] in ("done", "preempted") else 3)
        append_line(lines, {"event": "end", "attempt": number, **end})
        return int(code)


@pytest.fixture
def out(write_recipe: Callable[..., Path], tmp_path: Path) -> Path:
    (tmp_path / "hosts").write_text(HOSTS)
    changes = {
        "cluster.nodes": 2,
        "cluster.gpus_per_node": 2,
        "checkpoint.every_steps": 2,
        "launch": {"hostfile": "hosts", "recovery": {"spares": 1, "min_nodes": 1, "retries": 2}},
    }
    folder = tmp_path / "out"
    assert cli.main(["compile", str(write_recipe(changes)), "-o", str(folder)]) == 0
    return folder


@pytest.fixture
def supervised(out: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, Attempts]]:
    """supervised(alive, *ends): alive: hosts that answer, one list a look, the last one for
    ever."""

    def run(alive: list[str], *ends: dict[str, Any]) -> tuple[int, Attempts]:
        attempts, looks = Attempts(*ends), list(alive)

        def reachable(hosts: list[str]) -> dict[str, str]:
            names = looks.pop(0) if len(looks) > 1 else looks[0]
            return {host: host for host in hosts if host in names}

        monkeypatch.setattr(supervisor, "run_folder", attempts.run)
        monkeypatch.setattr(reachable_hosts, "reachable_hosts", reachable)
        monkeypatch.setattr(reachable_hosts.SshHosts, "poll_seconds", 0.01)
        monkeypatch.setattr(supervisor, "MAX_DELAY_SECONDS", 0.0)
        return cli.main(["run", str(out), "--supervise"]), attempts

    return run


def test_a_batch_that_failed_twice_is_left_out(
    write_recipe: Callable[..., Path],
    out: Path,
    supervised: Callable[..., tuple[int, Attempts]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    changes = {
        "cluster.nodes": 2,
        "cluster.gpus_per_node": 2,
        "checkpoint.every_steps": 2,
        "launch": {"hostfile": "hosts", "recovery": {"skip_batches": 1, "spares": 1}},
    }
    assert cli.main(["compile", str(write_recipe(changes)), "-o", str(out)]) == 0

    def diverge(_: Supervision) -> None:
        lines = [{"step": 3, "loss": 1.0, "grad_norm": 1.0}, {"step": 4, "loss": None}]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (out / "run" / "metrics.jsonl").write_text(text)

    end = {"outcome": "failed", "code": "SW6311", "cause": "x", "step": 4, "then": diverge}
    code, attempts = supervised(["ab"], dict(end), dict(end), DONE)
    assert code == 0 and len(attempts.calls) == 3
    (batch,) = read_skipped_batches(out)
    assert batch.step == 4 and batch.rows is not None and "step 4 trains rows" in batch.rows
    assert [each["recovery"].get("skipped_step") for each in read_attempts(out)] == [None, 4, None]
    assert "recovery     the batch of step 4 is skipped from now on: step 4" in (
        capsys.readouterr().out
    )
    # No other one, and no longer in a run from the start.
    code, attempts = supervised(["ab"], dict(end), dict(end), DONE)
    assert code == 3 and len(attempts.calls) == 2
    begin_attempt(load_plan(out), out, None, fresh=False)
    assert read_attempt(out).skipped_steps == (4,)
    begin_attempt(load_plan(out), out, None, fresh=True)
    assert read_attempt(out).skipped_steps == ()


def test_a_spare_host_takes_the_place(
    out: Path, supervised: Callable[..., tuple[int, Attempts]]
) -> None:
    end = {**LOST, "rank": 2, "host": "b", "step": 3, "checkpoint": "step-00000002"}
    code, attempts = supervised(["ab s", "as"], end, DONE)
    assert code == 0
    assert attempts.calls == [("out", "a b", "auto"), ("out", "a s", "auto")]
    first, second = read_attempts(out)
    assert (first["recovery"]["cause"], first["recovery"]["host"]) == ("host", "b")
    assert (first["recovery"]["action"], second["recovery"]["cause"]) == ("spare", "done")
    assert not (out / "run" / "supervisor.lease").exists()


def test_the_run_is_planned_for_what_is_left(
    out: Path, supervised: Callable[..., tuple[int, Attempts]]
) -> None:
    end = {**LOST, "rank": 2, "host": "b", "step": 3}
    code, attempts = supervised(["ab", "a"], end, DONE)
    assert code == 0
    assert attempts.calls == [("out", "a b", "auto"), ("nodes-1", "a", "auto")]
    plan = json.loads((out / "run/plans/nodes-1/plan.json").read_text())
    assert plan["nodes"] == 1 and plan["training"]["global_batch_size"] == 8


def test_it_starts_on_the_hosts_that_answer(
    supervised: Callable[..., tuple[int, Attempts]], capsys: pytest.CaptureFixture[str]
) -> None:
    code, attempts = supervised(["b"], DONE)
    assert code == 0 and attempts.calls == [("nodes-1", "b", "auto")]
    assert "1 of 2 hosts can be reached: planning again for 1 node on b" in capsys.readouterr().out


def test_it_waits_for_a_host(supervised: Callable[..., tuple[int, Attempts]]) -> None:
    code, attempts = supervised(["", "", "", "ab"], DONE)
    assert code == 0 and [call[1] for call in attempts.calls] == ["a b"]


def test_a_host_that_never_comes(
    supervised: Callable[..., tuple[int, Attempts]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(supervisor, "HOST_WAIT_SECONDS", 0.0)
    code, attempts = supervised([""])
    assert code == 3 and not attempts.calls
    assert "error[SW6324]: the supervised run is given up: the run cannot start; 0 of 2 hosts" in (
        capsys.readouterr().err
    )


def test_exit_codes_are_those_of_run(
    supervised: Callable[..., tuple[int, Attempts]], capsys: pytest.CaptureFixture[str]
) -> None:
    refused = {"outcome": "failed", "code": "SW6203", "cause": "x", "exit": 1}
    assert supervised(["ab"], refused)[0] == 1
    assert "SW6324" not in capsys.readouterr().err
    same = {**LOST, "rank": 1, "step": 3}
    code, attempts = supervised(["ab"], dict(same), dict(same))
    assert code == 3 and len(attempts.calls) == 2
    assert "two attempts in a row ended by the same cause after step 3" in capsys.readouterr().err


def test_requests_to_stop_end_it(
    out: Path, supervised: Callable[..., tuple[int, Attempts]]
) -> None:
    """They come by SIGTERM in an attempt or between two, by `stop`, and by run/stop."""
    signalled = {**LOST, "step": 3, "then": lambda each: each.stop_requested.set()}
    assert len(supervised(["ab"], signalled)[1].calls) == 1
    sent = {**LOST, "step": 3, "then": lambda _: signal.raise_signal(signal.SIGTERM)}
    assert len(supervised(["ab"], sent)[1].calls) == 1
    preempted = {"outcome": "preempted", "step": 3}
    touched = {**preempted, "then": lambda _: (out / SUPERVISOR_STOP).touch()}
    code, attempts = supervised(["ab"], touched)
    assert code == 0 and len(attempts.calls) == 1
    code, attempts = supervised(["ab"], {**preempted, "stop_requested": True})
    assert code == 0 and len(attempts.calls) == 1
    # A notice to a rank restarts it.
    assert len(supervised(["ab"], preempted, DONE)[1].calls) == 2


def test_the_lease_of_ended_ranks_is_not_waited_for(
    out: Path, supervised: Callable[..., tuple[int, Attempts]]
) -> None:
    """Rank 0 has ended on a host that answers; a host that does not may still run it."""

    def leave_lease(host: str) -> Callable[[Supervision], None]:
        def leave(_: Supervision) -> None:
            owner = replace(current_process_owner(RANKS, out), host=host, token=f"of {host}")
            (out / "run" / "lease").write_text(json.dumps(asdict(owner)))

        return leave

    end = {**LOST, "rank": 2, "step": 3}
    ends = ({**end, "then": leave_lease("a")}, {**end, "step": 5, "then": leave_lease("b")}, DONE)
    _, attempts = supervised(["ab", "ab", "a"], *ends)
    assert attempts.ended_ranks == [None, "of a", None]


def test_a_full_disk_is_known_without_the_line(
    out: Path, supervised: Callable[..., tuple[int, Attempts]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the end nor the decision could be written; run/status.json is rewritten in place."""
    text = "'/x/metrics.jsonl' cannot be used: No space left on device"

    def fill(_: Supervision) -> None:
        status = {"status": "failed", "attempt": 1, "code": "SW6323", "cause": text}
        (out / "run" / "status.json").write_text(json.dumps(status))
        monkeypatch.setattr("tests.unit.supervise.test_supervisor.append_line", lambda *_: None)

    code, attempts = supervised(["ab"], {**LOST, "then": fill})
    assert code == 3 and len(attempts.calls) == 1
    assert read_attempts(out)[0]["recovery"]["cause"] == "disk"
    assert read_json(out / "run" / "status.json")["code"] == "SW6323"


def test_schedulers_and_islands_are_refused(
    write_recipe: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_recipe({"launch": {"launcher": "slurm"}})
    assert cli.main(["compile", str(path), "-o", str(tmp_path / "slurm")]) == 0
    assert cli.main(["run", str(tmp_path / "slurm"), "--supervise"]) == 1
    assert "error[SW5214]: --supervise: the plan has no `launch.recovery`" in (
        capsys.readouterr().err
    )
    by_hand = write_recipe({"launch": {"launcher": "no_ssh"}})
    assert cli.main(["compile", str(by_hand), "-o", str(tmp_path / "no_ssh")]) == 0
    assert cli.main(["run", str(tmp_path / "no_ssh"), "--supervise"]) == 1
    assert "error[SW5214]: --supervise: no_ssh" in capsys.readouterr().err
    assert cli.main(["run", str(tmp_path / "slurm"), "--supervise", "--island", "all"]) == 1
    assert "does not restart islands" in capsys.readouterr().err


def test_spare_hosts_are_read_with_the_others(out: Path, tmp_path: Path) -> None:
    """`doctor` checks them too; a plain run takes the plan's hosts alone."""
    plan = load_plan(out)
    assert read_hostfile(plan, out, None) == ["a", "b", "s"]
    assert (out / "launch" / "hostfile").read_text() == "a slots=2\nb slots=2\n"
    more = tmp_path / "more"
    more.write_text(HOSTS + "t slots=2\n")
    with pytest.raises(Refusal) as caught:
        read_hostfile(plan, out, more)
    (found,) = caught.value.diagnostics
    assert found.code == "SW5203" and "2 nodes and 1 spare host" in found.message


def test_two_supervisors(out: Path, supervised: Callable[..., tuple[int, Attempts]]) -> None:
    """A second one, a plain run and a compile are refused while the first one lives."""
    codes: list[int] = []

    def others(_: Supervision) -> None:
        # In a thread, as signal handlers belong to the main one.
        def run() -> None:
            codes.extend(cli.main(["run", str(out), *options]) for options in ([], ["--supervise"]))

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()

    assert supervised(["ab"], {**DONE, "then": others})[0] == 0
    assert codes == [1, 1]

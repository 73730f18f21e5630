"""Two runs of one folder, or into one folder of checkpoints: the second is refused, however either
was started."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shardwright.cli import main as cli
from shardwright.diagnostics import Refusal
from shardwright.plan.plan import read_plan
from shardwright.train import run_attempt
from shardwright.train.run_attempt import (
    RANKS,
    RUN,
    acquire_lease_on_rank_0,
    begin_attempt,
    check_no_other_run,
    hold_run_lease,
    new_run_lease,
    take,
)
from shardwright.utils.run_lease import Lease, LeaseOwner, current_process_owner, lease_owner


@pytest.fixture
def folders(write_recipe: Callable[..., Path], tmp_path: Path) -> tuple[Path, Path]:
    """Two compiled folders whose checkpoints go to one place."""
    recipe = write_recipe({"checkpoint.directory": str(tmp_path / "shared")})
    for name in ("a", "b"):
        assert cli.main(["compile", str(recipe), "-o", str(tmp_path / name)]) == 0
        (tmp_path / name / "run").mkdir()
    return tmp_path / "a", tmp_path / "b"


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """Another process of this machine."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def owned_by(pid: int, folder: Path, role: str = RANKS) -> LeaseOwner:
    """As that process would say."""
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return dataclasses.replace(
        current_process_owner(role, folder), pid=pid, started=int(stat[19]), parent=os.getpid()
    )


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(Refusal) as refused:
        call()
    (diagnostic,) = refused.value.diagnostics
    assert diagnostic.code == "SW6006"
    return diagnostic.message


def test_a_second_launch_of_a_folder(
    folders: tuple[Path, Path], sleeper: subprocess.Popen[bytes]
) -> None:
    out, _ = folders
    plan = read_plan(out)
    first = Lease(new_run_lease(plan, out, RANKS).paths, owned_by(sleeper.pid, out))
    take(first, out)
    (out / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    before = {path: path.read_bytes() for path in (out / "run").iterdir()}
    for refused in (
        lambda: acquire_lease_on_rank_0(new_run_lease(plan, out, RANKS), out),
        lambda: hold_run_lease(plan, out).__enter__(),
    ):
        assert (
            f"another run of {str(out)!r} is alive" in (said := refusal(refused))
            and f"{sleeper.pid}" in said
        )
    check_no_other_run(plan, out.parent, 1)  # no lease at all
    refusal(lambda: check_no_other_run(plan, out, 1))
    check_no_other_run(
        dataclasses.replace(
            plan, ranks=(plan.ranks[0], dataclasses.replace(plan.ranks[1], node=1))
        ),
        out,
        1,
    )
    assert cli.main(["run", str(out), "--resume", "never"]) == 1
    after = {path: path.read_bytes() for path in (out / "run").iterdir()}
    assert after.items() >= before.items() and not (out / "run" / "status.json").exists()
    sleeper.kill()
    sleeper.wait()
    lease = new_run_lease(plan, out, RANKS)
    assert acquire_lease_on_rank_0(lease, out) is False, "nobody has begun its attempt"
    lease.release()
    first.release()


def test_two_folders_with_one_place_for_checkpoints(folders: tuple[Path, Path]) -> None:
    one, other = folders
    lease = new_run_lease(read_plan(one), one, RANKS)
    take(lease, one)
    message = refusal(
        lambda: acquire_lease_on_rank_0(new_run_lease(read_plan(other), other, RANKS), other)
    )
    assert f"a run of {str(one)!r}" in message and str(one.parent / "shared") in message
    assert lease_owner(other / "run" / "lease") is None, "what was taken before is given back"
    lease.release()
    assert not list((one.parent / "shared").iterdir())


def test_run_hands_its_lease_to_rank_0(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, _ = folders
    plan = read_plan(out)
    with hold_run_lease(plan, out) as run:
        begin_attempt(plan, out, None, fresh=True, lease=run.owner.token)
        ranks = new_run_lease(plan, out, RANKS)
        assert acquire_lease_on_rank_0(ranks, out) is True
        refusal(lambda: acquire_lease_on_rank_0(new_run_lease(plan, out, RANKS), out))
    assert lease_owner(out / "run" / "lease") == ranks.owner
    ranks.release()
    # Begun by hand beside a `run` that is still choosing its checkpoint.
    monkeypatch.setattr(run_attempt, "HANDOVER_TIMEOUT_SECONDS", 0.0)
    with hold_run_lease(plan, out):
        refusal(lambda: acquire_lease_on_rank_0(new_run_lease(plan, out, RANKS), out))


def test_ranks_of_one_launch_know_each_other(folders: tuple[Path, Path]) -> None:
    """Rank 0 and its neighbours have one parent."""
    out, _ = folders
    take(
        Lease(new_run_lease(read_plan(out), out, RANKS).paths, current_process_owner(RANKS, out)),
        out,
    )
    check_no_other_run(read_plan(out), out, 1)


def test_compile_onto_a_folder_that_trains(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Started by launch.sh, without `run`'s lock; on another host, by its beats alone."""
    out, _ = folders
    lease = new_run_lease(read_plan(out), out, RANKS)
    take(lease, out)
    assert cli.main(["compile", str(tmp_path / "recipe.json"), "-o", str(out)]) == 1
    assert "error[SW5106]" in capsys.readouterr().err
    lease.release()
    assert cli.main(["compile", str(tmp_path / "recipe.json"), "-o", str(out)]) == 0


def test_who_is_taken_over_says_so(folders: tuple[Path, Path]) -> None:
    out, _ = folders
    lease = new_run_lease(read_plan(out), out, RUN)
    diagnostic = run_attempt.lease_lost(lease.owner, out).diagnostics[0]
    assert diagnostic.code == "SW6216" and f"process {os.getpid()}" in diagnostic.message


def test_a_run_that_ended_without_a_word_is_said(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    out, _ = folders
    dead = dataclasses.replace(current_process_owner(RANKS, out), pid=2**22 + 1)
    (out / "run" / "lease").write_text(json.dumps(dataclasses.asdict(dead)))
    began = time.monotonic()
    with hold_run_lease(read_plan(out), out):
        pass
    assert time.monotonic() - began < 5
    assert (
        f"process {2**22 + 1} died without cleaning up; its lock is taken over"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("place", ["run", "shared"])
def test_a_place_that_cannot_be_written(folders: tuple[Path, Path], place: str) -> None:
    out, _ = folders
    path = out / "run" if place == "run" else out.parent / "shared"
    if place == "run":
        path.rmdir()
    path.write_text("a file")
    with pytest.raises(Refusal) as refused:
        take(new_run_lease(read_plan(out), out, RANKS), out)
    assert refused.value.diagnostics[0].code == "SW6209"

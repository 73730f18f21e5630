"""A supervisor inside a Slurm allocation, with stand-ins for the commands of Slurm."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwright.cli import main as cli
from shardwright.launch.preflight_checks import scheduler_errors
from shardwright.monitor.attempt_records import read_attempts
from shardwright.plan.plan import load_plan
from shardwright.supervise import slurm_allocation, supervisor
from shardwright.supervise.fewer_nodes import FewerNodes
from shardwright.supervise.slurm_allocation import SlurmAllocation
from tests.unit.supervise.test_supervisor import DONE, LOST, Attempts

HOSTNAMES = "IFS=,; for name in $3; do echo $name; done"
ANSWERS = """
[[ "$*" == *--overlap* ]] || exit 1
nodes=$(grep -o -- '--nodelist=[^ ]*' <<<"$*"); nodes=${nodes#*=}
IFS=,; for node in $nodes; do
  [[ $node != silent ]] || { [[ $nodes == silent ]] || exit 1; sleep 30; }
  [[ $node != bad ]] || { echo "shardwright-node bad only 1 of 2 GPUs answer|h-bad"; continue; }
  echo "shardwright-node $node ok|h-$node"
done
"""


@pytest.fixture
def allocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., SlurmAllocation]:
    """allocation(NODES): of a job with these nodes; run/steps of the folder has its job steps."""

    def make(nodes: str, left: str | None = None, preempt: str = "None") -> SlurmAllocation:
        programs, place = tmp_path / "programs", tmp_path / "steps"
        programs.mkdir(exist_ok=True)
        listed, told = f"cat {place} 2>/dev/null", f"echo PreemptTime={preempt}"
        texts = {
            "scontrol": f"[[ $2 == hostnames ]] && {{ {HOSTNAMES}; }} || {told}",
            "squeue": f"[[ $1 == --steps ]] && {{ {listed}; true; }} || echo {left or nodes}",
            "scancel": f'echo "$*" >>{place}.cancelled; rm {place}',
            "srun": ANSWERS,
        }
        for name, text in texts.items():
            (programs / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
            (programs / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
        monkeypatch.setattr(slurm_allocation, "program_path", lambda: os.environ["PATH"])
        monkeypatch.setattr(
            "shardwright.launch.launchers.job_scheduler.program_path", lambda: os.environ["PATH"]
        )
        for key, value in {"JOB_ID": "7", "JOB_NODELIST": nodes, "NO_KILL": "1"}.items():
            monkeypatch.setenv(f"SLURM_{key}", value)
        monkeypatch.setenv("SLURM_JOB_NUM_NODES", str(len(nodes.split(","))))
        monkeypatch.setenv("SLURM_OVERLAP", "")
        return SlurmAllocation(tmp_path)

    return make


def test_nodes_that_answer(
    allocation: Callable[..., SlurmAllocation],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A silent one ends the question to all; a node that Slurm took away is not asked."""
    monkeypatch.setattr(slurm_allocation, "ONE_ANSWERS_SECONDS", 2.0)
    nodes = allocation("a,b,bad,silent,gone", left="a,b,bad,silent")
    assert nodes.names() == ["a", "b", "bad", "silent"]
    assert nodes.reach(nodes.names()) == {"a": "h-a", "b": "h-b"}
    told = capsys.readouterr().err
    assert "node bad: only 1 of 2 GPUs answer" in told and "node silent: no answer" in told
    assert nodes.reach([]) == {}
    nodes.bind(["a", "b"])
    assert os.environ["SLURM_JOB_NODELIST"] == "a,b" and os.environ["SLURM_JOB_NUM_NODES"] == "2"
    assert os.environ["SLURM_OVERLAP"] == "1" and "SLURM_NO_KILL" not in os.environ


def test_steps_that_an_attempt_left(
    allocation: Callable[..., SlurmAllocation], tmp_path: Path
) -> None:
    nodes = allocation("a,b")
    nodes.end_attempt()
    assert not (tmp_path / "steps.cancelled").exists()
    (tmp_path / "steps").write_text("7.0|watch\n7.3|ranks\n7.batch|batch\n7.4|ranks\n")
    nodes.end_attempt()
    assert (tmp_path / "steps.cancelled").read_text() == "7.3 7.4\n"
    assert not nodes.is_preempted()
    assert allocation("a,b", preempt="2026-11-26T07:02:27").is_preempted()


RECIPE: dict[str, Any] = {
    "cluster.nodes": 2,
    "cluster.gpus_per_node": 2,
    "checkpoint.every_steps": 2,
    "launch": {"slurm": {"container": {"image": "i"}}, "recovery": {"spares": 1, "min_nodes": 1}},
}


@pytest.fixture
def out(write_recipe: Callable[..., Path], tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    assert cli.main(["compile", str(write_recipe(RECIPE)), "-o", str(folder)]) == 0
    return folder


def supervise(
    out: Path, monkeypatch: pytest.MonkeyPatch, alive: list[str], *ends: dict[str, Any]
) -> tuple[int, list[tuple[str, str]]]:
    """Run attempts that end as told; alive: nodes that answer, one text a look. Returns the exit
    code, and each attempt\'s folder and nodes."""
    attempts, looks, bound = Attempts(*ends), list(alive), list[str]()

    def reach(self: SlurmAllocation, hosts: list[str]) -> dict[str, str]:
        names = looks.pop(0) if len(looks) > 1 else looks[0]
        return {host: f"h-{host}" for host in hosts if host in names}

    def run(folder: Path, hostfile: Path | None, resume: str, supervision: Any) -> int:
        assert hostfile is None
        bound.append(os.environ["SLURM_JOB_NODELIST"])
        return attempts.run(folder, hostfile, resume, supervision)

    monkeypatch.setattr(SlurmAllocation, "reach", reach)
    monkeypatch.setattr(supervisor, "run_folder", run)
    monkeypatch.setattr(supervisor, "MAX_DELAY_SECONDS", 0.0)
    code = cli.main(["run", str(out), "--supervise"])
    return code, [(name, nodes) for (name, *_), nodes in zip(attempts.calls, bound, strict=True)]


def test_a_run_goes_on_with_what_is_left(
    out: Path, allocation: Callable[..., SlurmAllocation], monkeypatch: pytest.MonkeyPatch
) -> None:
    """First a spare node, then fewer nodes; the smaller plan\'s container has the run\'s folder."""
    allocation("a,b,s")
    first = {**LOST, "rank": 2, "host": "h-b", "step": 3, "checkpoint": "step-00000002"}
    second = {**LOST, "rank": 2, "host": "h-s", "step": 5, "checkpoint": "step-00000004"}
    code, calls = supervise(out, monkeypatch, ["abs", "as", "a"], first, second, DONE)
    assert (code, calls) == (0, [("out", "a,b"), ("out", "a,s"), ("nodes-1", "a")])
    assert [each["recovery"]["host"] for each in read_attempts(out)] == ["b", "s", None]
    script = (out / "run/plans/nodes-1/launch.sh").read_text()
    assert f",{out}:{out}" in script and "--nodelist=" in script
    assert (out / "run/plans/nodes-1/run").resolve() == (out / "run").resolve()


def test_too_few_nodes_are_no_failure_of_the_run(
    out: Path,
    allocation: Callable[..., SlurmAllocation],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """75 tells launch/job.sh to leave the lost nodes out: nobody waits for nodes that Slurm took
    away."""
    allocation("a,b,s", left=" ")
    monkeypatch.setattr(SlurmAllocation, "names", lambda self: [])
    assert supervise(out, monkeypatch, [""]) == (75, [])
    assert "0 of 2 hosts can be reached" in capsys.readouterr().err


def test_a_preempted_job_is_not_restarted_in_its_place(
    out: Path, allocation: Callable[..., SlurmAllocation], monkeypatch: pytest.MonkeyPatch
) -> None:
    allocation("a,b,s", preempt="2026-11-26T07:02:27")
    code, calls = supervise(out, monkeypatch, ["abs"], {"outcome": "preempted", "step": 3})
    assert code == 0 and len(calls) == 1


def test_outside_of_an_allocation_the_job_is_submitted(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    submitted: list[Path] = []

    def run(folder: Path, *_: Any) -> int:
        submitted.append(folder)
        return 0

    monkeypatch.setattr(supervisor, "run_folder", run)
    assert cli.main(["run", str(out), "--supervise"]) == 0 and submitted == [out]


def test_the_plan_of_fewer_nodes_links_the_run(out: Path) -> None:
    """Slurm\'s compiled folders begin with an empty run/."""
    fewer = FewerNodes(load_plan(out), out)
    assert fewer.can_plan(1)
    assert (fewer.compile(1) / "run").is_symlink()


def test_spare_nodes_belong_to_the_allocation(
    out: Path, allocation: Callable[..., SlurmAllocation]
) -> None:
    """`doctor` checks them too; a plain run takes the plan's nodes alone."""
    allocation("a,b,s")
    plan = load_plan(out)
    for spares, refused in ((0, True), (1, False)):
        messages = [each.message for each in scheduler_errors(plan, spares)]
        assert any("allocation has 3 nodes" in message for message in messages) == refused

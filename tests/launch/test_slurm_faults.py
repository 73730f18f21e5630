"""End jobs on a real Slurm of two nodes: by the time limit, a job that comes first, a lost node
(`make test-hosts`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launch.slurm_cluster import (
    DEAD_AFTER_CHECK,
    NODES,
    lose_node,
    output,
    slurm,
    state,
    wait_for,
    why_not,
)
from tests.launch.test_schedulers import compiled, log, submit
from tests.parity.harness import Case, metrics, newest_checkpoint, recipe, write_inputs

pytestmark = [pytest.mark.hosts, pytest.mark.skipif(bool(why_not()), reason=why_not())]
ENDED = ("COMPLETED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "CANCELLED")


def saving_run(folder: Path, steps: int, **options: Any) -> Path:
    """A tiny llama on two nodes with one rank each, which saves every fifth step."""
    case = Case(model="llama", data=2, nodes=2, launcher="slurm")
    write_inputs(case, folder)
    document = recipe(case, folder)
    document["training"] |= {"steps": steps}
    document["data"] = {"kind": "synthetic"}
    document["launch"]["slurm"] = options
    document["checkpoint"] = {**document.get("checkpoint", {}), "every_steps": 5, "keep": 3}
    return compiled(folder, document)


def trains(out: Path, after: int = 0) -> bool:
    return (out / "run" / "metrics.jsonl").exists() and any(
        line["step"] > after + 2 for line in metrics(out)
    )


def assert_done(out: Path, steps: int) -> None:
    lines = metrics(out)
    assert [line["step"] for line in lines] == list(range(1, steps + 1)), log(out)
    assert json.loads((out / "run" / "status.json").read_text())["status"] == "done"


def test_a_job_saves_before_its_time_is_up(tmp_path: Path) -> None:
    """Not TIMEOUT: the signal comes first, every step is saved, and 75 says that it is not done."""
    out = saving_run(tmp_path, 1_000_000, time="2:00", signal_seconds=60)
    with slurm(tmp_path / "slurm") as env:
        job = submit(out, env)
        wait_for(lambda: state(env, job).get("JobState") in ENDED, 240)
        told = state(env, job)
        assert (told["JobState"], told["ExitCode"]) == ("FAILED", "75:0"), log(out)
    saved = int(newest_checkpoint(out).name.removeprefix("step-"))
    assert saved == metrics(out)[-1]["step"] > 5
    assert json.loads((out / "run" / "status.json").read_text())["status"] != "running"


def test_a_job_that_comes_first_sends_it_back_to_the_queue(tmp_path: Path) -> None:
    """Preempted: SIGTERM, a checkpoint within the time of grace, and on once the nodes are free."""
    steps = 400
    out = saving_run(tmp_path, steps, requeue=True, time="30:00", partition="main")
    with slurm(tmp_path / "slurm") as env:
        job = submit(out, env)
        wait_for(lambda: trains(out), 120)
        first = ["--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null"]
        urgent = output(env, "sbatch", "--parsable", *first, "--wrap=sleep 5").strip()
        wait_for(lambda: state(env, urgent).get("JobState") in ENDED, 120)
        assert state(env, urgent)["JobState"] == "COMPLETED"
        stopped = int(newest_checkpoint(out).name.removeprefix("step-"))
        assert 2 < stopped < steps and metrics(out)[-1]["step"] == stopped, log(out)
        assert state(env, job).get("Restarts") == "1", log(out)
        output(env, "scontrol", "update", f"jobid={job}", "StartTime=now")
        wait_for(lambda: state(env, job).get("JobState") in ENDED, 240)
        assert state(env, job)["JobState"] == "COMPLETED", log(out)
    assert_done(out, steps)


def test_a_lost_node_is_left_out(tmp_path: Path) -> None:
    """Its slurmd and its rank are killed at once, and the job finds out before Slurm does: the run
    goes on from the newest checkpoint on the spare node."""
    steps = 400
    out = saving_run(tmp_path, steps, requeue=True, time="30:00")
    with slurm(tmp_path / "slurm", spare=True, dead_after=DEAD_AFTER_CHECK) as env:
        job = submit(out, env)
        wait_for(lambda: trains(out, after=5), 120)
        lose_node(NODES[1])
        wait_for(lambda: state(env, job).get("JobState") in ENDED, 240)
        again = str(int(job) + 1)
        wait_for(lambda: state(env, again).get("JobState") in ENDED, 240)
        told = state(env, again)
        assert (told["JobState"], told["ExcNodeList"]) == ("COMPLETED", NODES[1]), log(out)
        assert state(env, job).get("Restarts") == "0", "one job for the run, not two"
    assert f"job.sh: node {NODES[1]}: no answer" in log(out)
    assert_done(out, steps)

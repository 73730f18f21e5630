"""`run --supervise` inside the allocation of a real Slurm: nodes are set DOWN or lost, and the job
goes on with the rest (`make test-hosts`)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwright.checkpoint.checkpoint_storage import published_steps
from tests.launch.slurm_cluster import (
    DEAD_AFTER_CHECK,
    NODES,
    SPARE,
    lose_node,
    output,
    slurm,
    state,
    wait_for,
    why_not,
)
from tests.launch.supervised import check_same_losses, restart_seconds, status
from tests.launch.test_schedulers import compiled, log, submit
from tests.launch.test_slurm_faults import ENDED
from tests.parity.harness import Case, metrics, must, recipe, shardwright, write_inputs

pytestmark = [pytest.mark.hosts, pytest.mark.skipif(bool(why_not()), reason=why_not())]

STEPS, EVERY = 120, 10
THREE = Case(model="gpt2", data=3, nodes=3, launcher="slurm")
TWO = Case(model="gpt2", data=2, nodes=2, launcher="slurm")


def supervised(
    case: Case, folder: Path, recovery: dict[str, object], *, requeue: bool = True
) -> Path:
    write_inputs(case, folder)
    document = recipe(case, folder)
    document["training"] |= {"steps": STEPS}
    document["checkpoint"] = {"every_steps": EVERY, "keep": 3}
    document["launch"] |= {
        "recovery": recovery,
        "slurm": {"time": "30:00", "requeue": requeue},
        "env": {"SHARDWRIGHT_WATCH_SECONDS": "5"},
    }
    return compiled(folder, document)


def uninterrupted(folder: Path) -> Path:
    """The same recipe on this machine, on as many ranks."""
    document = json.loads((folder / "recipe.yaml").read_text())
    cluster = document["cluster"]
    cluster |= {"gpus_per_node": cluster["nodes"] * cluster["gpus_per_node"], "nodes": 1}
    document["launch"] = {}
    (folder / "whole.yaml").write_text(json.dumps(document))
    must(shardwright("compile", folder / "whole.yaml", "-o", folder / "whole"))
    must(shardwright("run", folder / "whole"))
    return folder / "whole"


def train_beyond(out: Path, env: dict[str, str], job: str, step: int) -> None:
    """Wait until there is a checkpoint of `step`, and the run trains beyond it."""

    def trains() -> bool:
        assert state(env, job).get("JobState") not in ENDED, log(out)
        saved = published_steps(out / "checkpoints")
        lines = metrics(out) if (out / "run" / "metrics.jsonl").exists() else []
        return bool(saved) and saved[-1][0] >= step and lines[-1]["step"] > step

    wait_for(trains, 240)


def completed(out: Path, env: dict[str, str], job: str) -> None:
    wait_for(lambda: state(env, job).get("JobState") in ENDED, 400)
    assert state(env, job)["JobState"] == "COMPLETED", log(out)


def test_a_node_set_down_is_planned_away(tmp_path: Path) -> None:
    out = supervised(THREE, tmp_path, {"min_nodes": 1})
    with slurm(tmp_path / "slurm", spare=True) as env:
        job = submit(out, env)
        train_beyond(out, env, job, EVERY)
        output(env, "scontrol", "update", f"NodeName={SPARE}", "State=DOWN", "Reason=test")
        completed(out, env, job)
        assert state(env, job)["Restarts"] == "0"
        assert output(env, "squeue", "--noheader") == ""
    first, second = status(out)["attempts"]
    assert (first["cause"], first["host"], first["nodes"]) == ("host", SPARE, 3), log(out)
    assert (second["cause"], second["nodes"], second["ended_step"]) == (None, 2, STEPS)
    assert "data=3" in first["layout"] and "data=2" in second["layout"]
    assert 0 <= first["ended_step"] - second["started_step"] < EVERY  # none before the last save
    assert f"planning again for 2 nodes on {', '.join(NODES)}" in log(out)
    check_same_losses(out, uninterrupted(tmp_path), relative=True)
    print(f"seconds lost: {first['seconds_lost']:.1f}")


def test_a_lost_node_is_replaced_by_a_spare_one(tmp_path: Path) -> None:
    """Its slurmd and its rank are killed at once. The run goes on before Slurm knows of it."""
    out = supervised(TWO, tmp_path, {"spares": 1})
    with slurm(tmp_path / "slurm", spare=True, dead_after=DEAD_AFTER_CHECK) as env:
        job = submit(out, env)
        train_beyond(out, env, job, EVERY)
        lose_node(NODES[1])
        completed(out, env, job)
    attempts = status(out)["attempts"]
    for restart in restart_seconds(out):
        restart.check()
        print(restart)
    assert [(a["cause"], a["host"], a["nodes"]) for a in attempts] == [
        ("host", NODES[1], 2),
        (None, None, 2),
    ], log(out)
    assert f"restarting with another host on {NODES[0]}, {SPARE}" in log(out)
    check_same_losses(out, uninterrupted(tmp_path), relative=True)


def test_too_few_nodes_send_the_job_back_to_the_queue(tmp_path: Path) -> None:
    """Another job takes its place, on a node that this one did not have."""
    out = supervised(TWO, tmp_path, {})
    with slurm(tmp_path / "slurm", spare=True) as env:
        job = submit(out, env)
        train_beyond(out, env, job, EVERY)
        output(env, "scontrol", "update", f"NodeName={NODES[1]}", "State=DOWN", "Reason=test")
        wait_for(lambda: state(env, job).get("JobState") in ENDED, 240)
        assert state(env, job)["ExitCode"] == "75:0", log(out)
        again = str(int(job) + 1)
        completed(out, env, again)
        assert state(env, again)["ExcNodeList"] == NODES[1]
    assert [a["cause"] for a in status(out)["attempts"]] == ["host", None], log(out)
    assert "1 of 2 hosts can be reached, and launch.recovery.min_nodes is 2" in log(out)
    check_same_losses(out, uninterrupted(tmp_path), relative=True)


@pytest.mark.parametrize("lost", [False, True])
def test_the_node_of_the_job_script_is_lost(lost: bool, tmp_path: Path) -> None:
    """Slurm ends the script of a node that is set DOWN, and lets the job run on without the script
    of a node that has lost power; another node submits the job again."""
    out = supervised(TWO, tmp_path, {})
    with slurm(tmp_path / "slurm", spare=True) as env:
        job = submit(out, env)
        train_beyond(out, env, job, EVERY)
        if lost:
            lose_node(NODES[0])
        else:
            output(env, "scontrol", "update", f"NodeName={NODES[0]}", "State=DOWN", "Reason=test")
        again = str(int(job) + 1)
        wait_for(lambda: state(env, again).get("ExcNodeList") == NODES[0], 120)
        wait_for(lambda: state(env, job)["JobState"] in ENDED, 60)
        assert state(env, job)["JobState"] == ("CANCELLED" if lost else "FAILED")
        output(env, "scancel", again)
    assert f"watch.sh: node {NODES[0]}, on which launch/job.sh ran, is lost" in log(out)

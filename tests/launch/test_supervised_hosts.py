"""`run --supervise` over several hosts, each with a network and processes of its own: `make
test-hosts`. A host is lost, returns, and is replaced by a spare one."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwright.checkpoint.checkpoint_storage import published_steps
from shardwright.monitor.attempt_records import read_attempts
from tests.launch.hosts import Host, hosts, why_not
from tests.launch.supervised import check_same_losses, restart_seconds, status
from tests.launch.test_hosts import hostfile, start
from tests.launch.wait_until import wait_until
from tests.parity.harness import Case, metrics, must, recipe, shardwright, write_inputs

pytestmark = [pytest.mark.hosts, pytest.mark.skipif(bool(why_not()), reason=why_not())]

STEPS, EVERY, MEMORY_EVERY = 160, 10, 5
THREE = Case(model="gpt2", data=3, nodes=3)
TWO = Case(model="gpt2", pipeline=2, nodes=2, accumulation=6)


def compiled(
    case: Case, folder: Path, recovery: dict[str, object], steps: int = STEPS, **checkpoint: object
) -> Path:
    write_inputs(case, folder)
    document = recipe(case, folder)
    document["training"] |= {"steps": steps}
    document["checkpoint"] = {"every_steps": EVERY, "keep": 3, **checkpoint}
    document["launch"]["recovery"] = recovery
    (folder / "recipe.yaml").write_text(json.dumps(document))
    must(shardwright("compile", folder / "recipe.yaml", "-o", folder / "out"))
    return folder / "out"


def uninterrupted(folder: Path) -> Path:
    """The same recipe on one machine, on as many ranks."""
    document = json.loads((folder / "recipe.yaml").read_text())
    cluster = document["cluster"]
    cluster |= {"gpus_per_node": cluster["nodes"] * cluster["gpus_per_node"], "nodes": 1}
    document["launch"] = {}
    (folder / "whole.yaml").write_text(json.dumps(document))
    must(shardwright("compile", folder / "whole.yaml", "-o", folder / "whole"))
    must(shardwright("run", folder / "whole"))
    return folder / "whole"


def reached(out: Path, process: subprocess.Popen[str], step: int, attempt: int = 1) -> None:
    """Wait until a checkpoint of `step` is there, and the attempt trains beyond it."""

    def trains() -> bool:
        assert process.poll() is None, process.communicate()
        saved = published_steps(out / "checkpoints")
        lines = metrics(out) if (out / "run" / "metrics.jsonl").exists() else []
        newest = lines[-1] if lines else {"attempt": 0, "step": 0}
        return (
            bool(saved)
            and saved[-1][0] >= step
            and newest["attempt"] == attempt
            and newest["step"] > step
        )

    wait_until(trains, f"step {step} of attempt {attempt}", 400)


def test_a_lost_host_is_planned_away_and_taken_back(tmp_path: Path) -> None:
    with hosts(3, tmp_path / "net") as made:
        out = compiled(THREE, tmp_path, {"min_nodes": 1})
        process = start(
            made[0], "run", out, "--hostfile", hostfile(made, THREE, tmp_path), "--supervise"
        )
        reached(out, process, EVERY)
        made[2].must("ip", "link", "set", "eth0", "down")
        wait_until(lambda: (out / "run/plans/nodes-2/plan.json").exists(), "no plan", 300)
        made[2].must("ip", "link", "set", "eth0", "up")
        told, errors = process.communicate(timeout=900)
        assert process.returncode == 0, told[-3000:] + errors[-3000:]
        attempts = status(out)["attempts"]
        assert [(a["cause"], a["host"], a["nodes"]) for a in attempts] == [
            ("host", "c", 3),
            ("return", None, 2),
            (None, None, 3),
        ], attempts
        first, second, third = attempts
        assert first["ended_step"] - second["started_step"] < EVERY  # no further than the last save
        assert third["started_step"] == second["ended_step"]
        assert "data=3" in first["layout"] and "data=2" in second["layout"]
        assert "planning again for 2 nodes on a, b" in told and "back to 3 nodes" in told
        check_same_losses(out, uninterrupted(tmp_path), relative=True)


PAIRS: dict[str, tuple[Case, str]] = {
    "pipeline": (Case(model="llama", pipeline=4, nodes=2, accumulation=4), "data=2"),
    "tensor": (Case(model="llama", tensor=2, data=2, nodes=2), "tensor=2"),
    "pipeline-tensor": (Case(model="llama", pipeline=2, tensor=2, nodes=2), "data=2"),
    "pipeline-data": (Case(model="gpt2", pipeline=2, data=2, nodes=2), "pipeline=2"),
    "zero-0": (Case(model="llama", data=4, zero_stage=0, nodes=2, accumulation=1), "zero_stage=0"),
    "zero-1": (Case(model="gpt2", data=4, zero_stage=1, nodes=2, accumulation=1), "zero_stage=1"),
    "zero-2": (Case(model="llama", data=4, zero_stage=2, nodes=2, accumulation=1), "zero_stage=2"),
    "zero-3": (Case(model="llama", data=4, zero_stage=3, nodes=2, accumulation=1), "zero_stage=3"),
    "context": (Case(model="llama", context=2, data=2, nodes=2), "context=2"),
    "context-zero-3": (
        Case(model="llama", context=2, data=2, zero_stage=3, nodes=2),
        "zero_stage=3",
    ),
    "expert": (Case(model="mixtral", data=4, expert=2, nodes=2, accumulation=1), "expert=2"),
    "expert-tensor": (Case(model="mixtral", data=2, expert=2, tensor=2, nodes=2), "expert=2"),
    "megatron-tensor": (
        Case(model="llama", tensor=2, data=2, nodes=2, target="megatron"),
        "tensor=2",
    ),
    "megatron-pipeline": (
        Case(model="llama", pipeline=2, data=2, nodes=2, target="megatron"),
        "pipeline=2",
    ),
}
"""name -> (the layout on two nodes of two ranks each, what the plan for one node keeps of it)."""


@pytest.mark.prove
@pytest.mark.parametrize("name", PAIRS)
def test_a_layout_is_planned_again_for_one_node(tmp_path: Path, name: str, proved: Any) -> None:
    """One of two hosts dies; the same batches are trained on the other one, in half the ranks."""
    case, kept = PAIRS[name]
    with hosts(2, tmp_path / "net") as made:
        out = compiled(case, tmp_path, {"min_nodes": 1}, steps=24)
        named: Path = hostfile(made, case, tmp_path)
        process = start(made[0], "run", out, "--hostfile", named, "--supervise")
        reached(out, process, EVERY)
        made[1].keeper.kill()
        told, errors = process.communicate(timeout=600)
        assert process.returncode == 0, told[-3000:] + errors[-3000:]
    first, second = status(out)["attempts"]
    assert (first["cause"], first["host"], first["nodes"], second["nodes"]) == ("host", "b", 2, 1)
    assert kept in second["layout"] and first["layout"] != second["layout"]
    assert first["ended_step"] - second["started_step"] < EVERY
    off = check_same_losses(out, uninterrupted(tmp_path), relative=True)
    (restart,) = restart_seconds(out)
    restart.check()
    layouts = {"from": first["layout"], "to": second["layout"]}
    figures = {**layouts, "loss_difference": off, **restart.figures()}
    proved("recovery-hosts", name, figures)
    print(figures)


def test_a_dead_host_is_replaced_by_a_spare_one(tmp_path: Path) -> None:
    with hosts(3, tmp_path / "net") as made:
        out = compiled(TWO, tmp_path, {"spares": 1}, steps=30)
        named: Path = hostfile(made, TWO, tmp_path)
        process = start(made[0], "run", out, "--hostfile", named, "--supervise")
        reached(out, process, EVERY)
        made[1].keeper.kill()
        told, errors = process.communicate(timeout=900)
        assert process.returncode == 0, told[-3000:] + errors[-3000:]
        attempts = status(out)["attempts"]
        assert [(a["cause"], a["host"], a["nodes"]) for a in attempts] == [
            ("host", "b", 2),
            (None, None, 2),
        ], attempts
        assert attempts[0]["layout"] == attempts[1]["layout"]
        assert "restarting with another host on a, c" in told
        _expect_empty(made[2])
        for restart in restart_seconds(out):
            restart.check()
            print(restart)
        check_same_losses(out, uninterrupted(tmp_path), relative=True)


def test_a_lost_host_comes_back_from_the_memory_of_its_peer(tmp_path: Path) -> None:
    """No checkpoint is on disk. The dead host's part is in the memory of the other one, and goes to
    the spare one."""
    with hosts(3, tmp_path / "net") as made:
        for host in made:
            host.must("mount", "-t", "tmpfs", "tmpfs", "/dev/shm")
        out = compiled(
            TWO,
            tmp_path,
            {"spares": 1},
            steps=60,
            every_steps=60,
            in_memory=True,
            in_memory_every=MEMORY_EVERY,
        )
        named: Path = hostfile(made, TWO, tmp_path)
        process = start(made[0], "run", out, "--hostfile", named, "--supervise")

        def trains() -> bool:
            assert process.poll() is None, process.communicate()
            copies = out / "run" / "memory_copies.jsonl"
            return copies.exists() and len(copies.read_text().splitlines()) > 2

        wait_until(trains, "three copies", 400)
        made[1].keeper.kill()
        told, errors = process.communicate(timeout=900)
        assert process.returncode == 0, told[-3000:] + errors[-3000:]
        first, second = status(out)["attempts"]
        assert (first["cause"], first["host"], first["nodes"]) == ("host", "b", 2)
        assert (second["cause"], second["nodes"]) == (None, 2)
        assert first["layout"] == second["layout"]
        assert read_attempts(out)[0]["end"]["checkpoint"] is None
        assert f"resumes from the copy of step {second['started_step']} in memory" in told
        assert 0 < first["ended_step"] < 60
        assert 0 <= first["ended_step"] - second["started_step"] <= MEMORY_EVERY
        for restart in restart_seconds(out):
            restart.check()
            print(restart, first["ended_step"], second["started_step"])
        check_same_losses(out, uninterrupted(tmp_path), relative=True)


def test_open_mpi_goes_on_with_a_spare_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        monkeypatch.setenv(name, "1")
    case = replace(TWO, launcher="openmpi")
    with hosts(3, tmp_path / "net") as made:
        out = compiled(case, tmp_path, {"spares": 1}, steps=60)
        named: Path = hostfile(made, case, tmp_path)
        process = start(made[0], "run", out, "--hostfile", named, "--supervise")
        reached(out, process, EVERY)
        made[1].keeper.kill()
        told, errors = process.communicate(timeout=900)
        assert process.returncode == 0, told[-3000:] + errors[-3000:]
        first, second = status(out)["attempts"]
        assert (first["cause"], first["host"], second["cause"]) == ("host", "b", None)
        assert first["ended_step"] - second["started_step"] < EVERY
        for host in (made[0], made[2]):
            _expect_empty(host)
        for restart in restart_seconds(out):
            restart.check()
            print(restart)
        check_same_losses(out, uninterrupted(tmp_path), relative=True)


def test_a_stopped_rank_on_another_host_is_killed(tmp_path: Path) -> None:
    """It answers nothing: named by its host, killed by its number, and the run goes on."""
    with hosts(2, tmp_path / "net") as made:
        out = compiled(TWO, tmp_path, {}, steps=30)
        document = json.loads((tmp_path / "recipe.yaml").read_text())
        document["launch"]["env"] = {"SHARDWRIGHT_STALL_SECONDS": "45"}
        (tmp_path / "recipe.yaml").write_text(json.dumps(document))
        must(shardwright("compile", tmp_path / "recipe.yaml", "-o", out))
        named: Path = hostfile(made, TWO, tmp_path)
        process = start(made[0], "run", out, "--hostfile", named, "--supervise")
        reached(out, process, EVERY)
        pid = json.loads((out / "run" / "ranks" / "rank-00001.json").read_text())["pid"]
        made[1].must("kill", "-STOP", pid)
        told, errors = process.communicate(timeout=900)
        assert process.returncode == 0, told[-3000:] + errors[-3000:]
        first, second = status(out)["attempts"]
        assert (first["cause"], first["rank"], first["host"]) == ("hang", 1, "b")
        assert second["cause"] is None and "the run hung at rank 1 on host b" in told
        assert made[1].run("kill", "-0", pid).returncode != 0
        for host in made:
            _expect_empty(host)
        check_same_losses(out, uninterrupted(tmp_path), relative=True)


def _expect_empty(host: Host) -> None:
    wait_until(lambda: not host.processes(), f"left on {host.name}")

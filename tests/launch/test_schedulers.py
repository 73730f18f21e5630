"""Training that a scheduler starts, with parity: a real Slurm of two nodes, and mpirun (`make
test-hosts`)."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwright.recipe.sbatch_options import options as sbatch_options
from tests.launch.slurm_cluster import NODES, SPARE, output, slurm, state, wait_for, why_not
from tests.parity.harness import (
    STEPS,
    Case,
    compare,
    metrics,
    must,
    newest_checkpoint,
    recipe,
    write_inputs,
)

pytestmark = pytest.mark.hosts
needs_slurm = pytest.mark.skipif(bool(why_not()), reason=why_not())
needs_mpi = pytest.mark.skipif(
    shutil.which("mpirun") is None, reason="no mpirun here: make test-hosts installs it"
)


def compiled(folder: Path, document: dict[str, Any], *options: str) -> Path:
    """Write the document as a recipe into the folder, and return where it is compiled."""
    recipe_file, out = folder / "recipe.yaml", folder / "out"
    recipe_file.write_text(json.dumps(document))
    words = ["compile", str(recipe_file), "-o", str(out), *options]
    command = [sys.executable, "-m", "shardwright", *words]
    must(subprocess.run(command, capture_output=True, text=True))
    return out


def submit(out: Path, env: dict[str, str]) -> str:
    """`shardwright run` outside an allocation; returns the job's number."""
    command = [sys.executable, "-m", "shardwright", "run", str(out)]
    printed = must(
        subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    ).stdout
    found = re.search(r"^submitted +job (\d+)$", printed, re.M)
    assert found is not None, printed
    return found[1]


def log(out: Path) -> str:
    return "".join(path.read_text()[-3000:] for path in (out / "run").glob("slurm-*.log"))


@needs_slurm
def test_slurm_trains_over_two_nodes_like_one_process(tmp_path: Path) -> None:
    with slurm(tmp_path / "slurm") as env:

        def start(out: Path) -> None:
            job = submit(out, env)
            wait_for(
                lambda: (
                    state(env, job).get("JobState") not in ("PENDING", "CONFIGURING", "RUNNING")
                ),
                400,
            )
            assert state(env, job)["JobState"] == "COMPLETED", log(out)
            ranks = [
                json.loads(path.read_text()) for path in sorted((out / "run" / "ranks").iterdir())
            ]
            assert [rank["rank"] for rank in ranks] == [0, 1]

        compare(Case(model="llama", pipeline=2, nodes=2, launcher="slurm"), tmp_path, start)


@needs_slurm
def test_slurm_leaves_out_a_node_that_fails_the_preflight(tmp_path: Path) -> None:
    """The job submits itself again without the node, and the run is done on the spare one."""
    case = Case(model="llama", data=2, nodes=2, launcher="slurm")
    write_inputs(case, tmp_path)
    document = recipe(case, tmp_path)
    document["training"] |= {"steps": 5}
    document["data"] = {"kind": "synthetic"}
    document["launch"]["slurm"] = {"requeue": True, "time": "30:00"}
    out = compiled(tmp_path, document)
    bad, script = NODES[1], out / "launch" / "preflight.sh"
    broken = f'[[ $SLURMD_NODENAME != {bad} ]] || answer "broken"\n'
    script.write_text(script.read_text().replace("answer ok", f"{broken}answer ok"))
    with slurm(tmp_path / "slurm", spare=True) as env:
        job = submit(out, env)
        ended = ("FAILED", "COMPLETED")
        wait_for(lambda: state(env, job).get("JobState") in ended, 120)
        assert state(env, job)["ExitCode"] == "75:0", log(out)
        again = str(int(job) + 1)
        wait_for(lambda: state(env, again).get("JobState") in ended, 300)
        told = state(env, again)
        assert (told["JobState"], told["ExcNodeList"]) == ("COMPLETED", bad), log(out)
    assert f"job.sh: node {bad}: broken" in log(out)
    assert json.loads((out / "run" / "status.json").read_text())["status"] == "done"


@needs_slurm
def test_slurm_queues_a_run_again_that_was_told_to_stop(tmp_path: Path) -> None:
    """The signal that Slurm sends before the time is up: a checkpoint, the same job again, and on
    from there."""
    case = Case(model="llama", data=2, nodes=2, launcher="slurm")
    write_inputs(case, tmp_path)
    document = recipe(case, tmp_path)
    document["training"] |= {"steps": 60}
    document["data"] = {"kind": "synthetic"}
    document["launch"]["slurm"] = {
        "requeue": True,
        "time": "30:00",
        "constraint": "fast",
        "extra": ["--nice=5"],
    }
    document["launch"]["setup_script"] = "set-up.sh"
    (tmp_path / "set-up.sh").write_text("export SET_UP=$undefined-yes\ncd /\nfalse\n")
    out = compiled(tmp_path, document)
    with slurm(tmp_path / "slurm") as env:
        job = submit(out, env)
        wait_for(lambda: (out / "run" / "metrics.jsonl").exists() and len(metrics(out)) > 2, 200)
        output(env, "scancel", "--batch", "--signal=USR1", job)
        wait_for(lambda: state(env, job).get("Restarts") == "1", 120)
        stopped = int(newest_checkpoint(out).name.removeprefix("step-"))
        assert 2 < stopped < 60, "it was to stop on the way"
        output(
            env, "scontrol", "update", f"jobid={job}", "StartTime=now"
        )  # Slurm would wait two minutes
        wait_for(lambda: state(env, job).get("JobState") == "COMPLETED", 300)
    lines = metrics(out)
    assert [line["step"] for line in lines] == list(range(1, 61)), log(out)
    assert {line["attempt"] for line in lines if line["step"] > stopped} == {2}
    assert json.loads((out / "run" / "status.json").read_text())["status"] == "done"


@needs_slurm
def test_slurm_takes_every_option_and_doctor_asks_it(tmp_path: Path) -> None:
    """Nothing trains: the job is held, and doctor submits none."""
    case = Case(model="llama", data=2, nodes=2, launcher="slurm")
    write_inputs(case, tmp_path)
    document = recipe(case, tmp_path)
    document["data"] = {"kind": "synthetic"}
    options = {
        "partition": "main",
        "constraint": "fast&fast",
        "exclude": SPARE,
        "reservation": "ours",
    }
    extra = {"comment": "two words", "nice": 5, "hold": True, "mail-type": "END,FAIL"}
    document["launch"]["slurm"] = {**options, "extra": extra}
    out = compiled(tmp_path, document)
    with slurm(tmp_path / "slurm", spare=True) as env:
        help = output(env, "sbatch", "--help")
        assert set(re.findall(r"--([a-z][a-z-]+)", help)) <= {*sbatch_options()}
        reservation = [
            "reservationname=ours",
            "users=root",
            "nodes=ALL",
            "starttime=now",
            "duration=10",
        ]
        output(env, "scontrol", "create", "reservation", *reservation)
        job = submit(out, env)
        told = output(env, "scontrol", "show", "job", job)
        for word in (
            "Partition=main",
            "Features=fast&fast",
            f"ExcNodeList={SPARE}",
            "Reservation=ours",
            "Nice=5",
        ):
            assert word in told, told
        assert (
            "Comment=two words" in told
            and "JobState=PENDING" in told
            and "MailType=END,FAIL" in told
        )
        output(env, "scancel", job)

        doctor = [sys.executable, "-m", "shardwright", "doctor", str(out), "--json"]
        asked = subprocess.run(doctor, env=env, capture_output=True, text=True, timeout=120)
        checks = {check["name"]: check for check in json.loads(asked.stdout)["checks"]}
        assert asked.returncode == 0, asked.stdout
        assert (
            checks["partition"]["told"] == "main: 3 nodes"
            and "in partition main" in checks["job"]["told"]
        )
        assert not checks["nodes"]["checked"] and not output(env, "squeue", "--noheader").strip()

        inside = [
            "salloc",
            "--nodes=2",
            "--ntasks-per-node=1",
            "--reservation=ours",
            "--quiet",
            *doctor,
        ]
        tried = subprocess.run(inside, env=env, capture_output=True, text=True, timeout=120)
        checks = {check["name"]: check for check in json.loads(tried.stdout)["checks"]}
        assert tried.returncode == 0, tried.stdout
        assert (
            checks["srun"]["told"] == "2 of 2 hosts answer"
            and checks["all-reduce"]["told"] == "over all hosts"
        )

        compiled(tmp_path, document, "--set", "launch.slurm.constraint=slow")
        refused = subprocess.run(doctor, env=env, capture_output=True, text=True, timeout=120)
        (problem,) = (
            p
            for check in json.loads(refused.stdout)["checks"]
            for p in check["problems"]
            if p["code"] == "SW5315"
        )
        assert refused.returncode == 1 and "Invalid feature specification" in problem["message"]


@needs_mpi
def test_openmpi_trains_like_one_process(tmp_path: Path) -> None:
    # mpirun refuses to run as root, which the tests may be.
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

    def start(out: Path) -> None:
        command = [sys.executable, "-m", "shardwright", "run", str(out)]
        done = must(
            subprocess.run(
                command, env={**os.environ, **allowed}, capture_output=True, text=True, timeout=400
            )
        )
        assert f"done at step {STEPS} of {STEPS}" in done.stdout
        assert "mpirun" in (out / "run" / "launcher.log").read_text()

    compare(Case(model="llama", data=2, zero_stage=2, launcher="openmpi"), tmp_path, start)

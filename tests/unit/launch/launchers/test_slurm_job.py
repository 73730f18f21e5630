"""launch/job.sh from its start to its exit code: cores, bad nodes, signals, and runs that are not
done."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwright.compile.compiled_folder import write_folder
from shardwright.compile.recipe_compiler import compile_recipe
from shardwright.recipe.recipe_loader import load_recipe
from tests.unit.launch.launchers.fake_programs import install, shell_warnings
from tests.unit.launch.launchers.two_node_recipes import KUBERNETES, TWO_NODES, Compile

ALLOCATION = {
    "SLURM_JOB_ID": "12",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "n[1-2]",
}


def program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
    (folder / name).chmod(0o755)


def job(
    out: Path, folder: Path, *arguments: str, programs: dict[str, str], **env: str
) -> subprocess.Popen[str]:
    """Start launch/job.sh in an allocation of n1 and n2, as Slurm does."""
    path = install(folder)
    for name, text in programs.items():
        program(folder, name, text)
    return subprocess.Popen(
        ["bash", "launch/job.sh", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=out,
        env={"PATH": path, **ALLOCATION, **env},
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, error = process.communicate(timeout=60)
    return process.returncode, out, error


GPUS = (
    '[[ $1 != --list-gpus ]] || for ((i = 0; i < ${{GPUS_{0}:-2}}; i++)); do echo "GPU $i: A"; done'
)
SMI = "\n".join(
    (
        "case $SLURMD_NODENAME in",
        f"n1) {GPUS.format('n1')} ;;",
        f"n2) {GPUS.format('n2')} ;;",
        "esac",
        "name=REMAP_$SLURMD_NODENAME",
        "[[ $1 != --query-remapped-rows=* ]] || echo ${!name:-0}",
    )
)
STOPPED = 'mkdir -p run; echo \'{"status": "preempted"}\' >run/status.json'
NODES_OF_JOB = "printf 'n1\\nn2\\n'"
SBATCH = "printf 'sbatch:'; printf '<%s>' \"$@\"; echo"


def test_slurm_can_open_the_log_of_the_first_job(compiled: Compile) -> None:
    for _ in range(2):  # onto the earlier output, too
        out = compiled({"slurm": {}})
        assert "#SBATCH --output=run/slurm-%j.log" in (out / "launch/job.sh").read_text()
        (out / "run").rmdir()


@pytest.mark.parametrize(
    ("slurm", "cluster", "cores"),
    [
        ({"exclusive": False}, {}, 8),
        ({"exclusive": False, "cpus_per_node": 48}, {}, 48),
        ({"exclusive": True}, {}, None),
        ({"exclusive": False}, {"gpu": "cpu", "gpus_per_node": 2}, 2),
    ],
)
def test_a_rank_never_gets_one_core_by_accident(
    slurm: dict[str, Any], cluster: dict[str, Any], cores: int | None, compiled: Compile
) -> None:
    out = compiled({"slurm": slurm}, cluster={**TWO_NODES["cluster"], **cluster})
    words = (out / "launch/job.sh").read_text().splitlines()
    told = [word for word in words if word.startswith("#SBATCH --cpus-per-task")]
    assert told == ([] if cores is None else [f"#SBATCH --cpus-per-task={cores}"])


def test_good_nodes_start_the_run(compiled: Compile, tmp_path: Path) -> None:
    out = compiled({"slurm": {}})
    code, printed, error = ended(job(out, tmp_path / "bin", programs={"nvidia-smi": SMI}))
    assert code == 0 and "shardwright:<run><.><--resume><auto>" in printed and not error


@pytest.mark.parametrize(
    ("trouble", "cause"),
    [
        ({"GPUS_n2": "1"}, "only 1 of 2 GPUs answer"),
        ({"REMAP_n2": "1"}, "a GPU cannot replace damaged memory rows"),
    ],
)
def test_a_bad_node_is_left_out(
    trouble: dict[str, str], cause: str, compiled: Compile, tmp_path: Path
) -> None:
    programs = {"nvidia-smi": SMI, "sbatch": SBATCH}
    out = compiled({"slurm": {"requeue": True, "exclude": "n9"}})
    code, printed, error = ended(job(out, tmp_path / "bin", "never", programs=programs, **trouble))
    assert code == 75 and "shardwright:" not in printed
    assert f"job.sh: node n2: {cause}" in error and "node n1" not in error
    after = "sbatch:<--dependency=afterany:12>"
    assert f"{after}<--exclude=n9,n2><launch/job.sh><never><n9,n2><1>" in printed
    again = job(out, tmp_path / "bin", "auto", "n9,n7", "2", programs=programs, **trouble)
    assert f"{after}<--exclude=n9,n7,n2><launch/job.sh><auto><n9,n7,n2><3>" in ended(again)[1]
    last = ended(job(out, tmp_path / "bin", "auto", "n9,n7", "3", programs=programs, **trouble))
    assert last[0] == 75 and "sbatch:" not in last[1]
    assert "sbatch --exclude=n9,n7,n2 launch/job.sh auto" in last[2]


def test_without_requeue_a_bad_node_is_named(compiled: Compile, tmp_path: Path) -> None:
    programs = {"nvidia-smi": SMI, "sbatch": SBATCH}
    out = compiled({"slurm": {}})
    code, printed, error = ended(job(out, tmp_path / "bin", programs=programs, GPUS_n1="0"))
    assert code == 75 and "sbatch:" not in printed and "shardwright:" not in printed
    assert "sbatch --exclude=n1 launch/job.sh auto" in error


def test_nodes_that_do_not_answer(compiled: Compile, tmp_path: Path) -> None:
    """One of two is bad; if none answers, srun is at fault, which the run itself will say."""
    out = compiled({"slurm": {}})
    one = {"srun": 'echo "shardwright-node n1 ok"'}
    code, printed, error = ended(job(out, tmp_path / "bin", programs=one))
    assert code == 75 and "job.sh: node n2: no answer" in error and "shardwright:" not in printed
    none = {"srun": "exit 1"}
    code, printed, error = ended(job(out, tmp_path / "bin", programs=none))
    assert "the nodes are not checked" in error and "shardwright:<run>" in printed


RUN = (
    "trap 'echo told; sleep 0.3; exit 0' USR1; mkdir -p run\n"
    'echo \'{"status": "STATUS"}\' >run/status.json; touch run/began\n'
    "while :; do sleep 0.05; done"
)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
@pytest.mark.parametrize(("status", "expected"), [("preempted", 75), ("done", 0)])
def test_a_signal_asks_the_run_to_stop(
    name: str, status: str, expected: int, compiled: Compile, tmp_path: Path
) -> None:
    out = compiled({"slurm": {"requeue": True}})
    programs = {
        "shardwright": RUN.replace("STATUS", status),
        "scontrol": f'[[ $1 != requeue ]] || echo "scontrol:$*"; {NODES_OF_JOB}',
    }
    process = job(out, tmp_path / "bin", programs=programs)
    await_file(out / "run" / "began")
    process.send_signal(getattr(signal, name))
    code, printed, error = ended(process)
    assert (code, "told" in printed) == (expected, True), error
    assert ("scontrol:requeue 12" in printed) == (status == "preempted")


def test_a_job_whose_run_is_not_done_does_not_succeed(compiled: Compile, tmp_path: Path) -> None:
    out = compiled({"slurm": {}})
    programs = {"shardwright": STOPPED}
    assert ended(job(out, tmp_path / "bin", programs=programs))[0] == 75
    failed = {"shardwright": "exit 3"}
    assert ended(job(out, tmp_path / "bin", programs=failed | {"nvidia-smi": SMI}))[0] == 3


@pytest.mark.parametrize("preempted", [False, True])
def test_a_preempted_job_is_queued_again(
    preempted: bool, compiled: Compile, tmp_path: Path
) -> None:
    """Slurm does not do it where the job ends by itself; `shardwright stop` ends it for good."""
    out = compiled({"slurm": {"requeue": True}})
    when = "2026-11-26T07:02:27" if preempted else "None"
    requeue = f'requeue) echo "scontrol:$*" ;; show) echo "PreemptTime={when}" ;;'
    programs = {
        "shardwright": STOPPED,
        "nvidia-smi": SMI,
        "scontrol": f"[[ $2 == hostnames ]] && {NODES_OF_JOB} || case $1 in {requeue} esac",
    }
    code, printed, error = ended(job(out, tmp_path / "bin", programs=programs))
    assert code == 75, error
    assert ("scontrol:requeue 12" in printed) == preempted


@pytest.mark.parametrize("lost", [False, True])
def test_a_failed_run_has_its_nodes_checked_again(
    lost: bool, compiled: Compile, tmp_path: Path
) -> None:
    """The job that is submitted counts anew; Slurm is not to queue this one again beside it."""
    out = compiled({"slurm": {"requeue": True}})
    bad = "n2" if lost else "none"
    programs = {
        "nvidia-smi": f"[[ -e failed && $SLURMD_NODENAME == {bad} ]] && exit 1\n{SMI}",
        "sbatch": SBATCH,
        "shardwright": "touch failed; exit 3",
        "scontrol": f'[[ $1 != update ]] || echo "scontrol:$*"; {NODES_OF_JOB}',
    }
    code, printed, error = ended(job(out, tmp_path / "bin", "never", programs=programs))
    assert (code, "node n2: nvidia-smi fails" in error) == ((75, True) if lost else (3, False))
    told = "sbatch:<--dependency=afterany:12><--exclude=n2><launch/job.sh><auto><n2><1>"
    assert (told in printed, "scontrol:update JobId=12 Requeue=0" in printed) == (lost, lost)


def supervised(compiled: Compile, *, requeue: bool = True, **recovery: Any) -> Path:
    return compiled({"slurm": {"requeue": requeue}, "recovery": recovery})


WAITING_WATCH = (
    "[[ $* != *watch.sh* ]] || { trap 'echo watch:ended >&2; exit 0' USR2; "
    "while :; do sleep 0.05; done; }\n"
    "while [[ $1 == --* ]]; do shift; done\n"
    "for SLURMD_NODENAME in n1 n2; do export SLURMD_NODENAME; [[ $SLURMD_NODENAME != ${LOST:-} ]] "
    '|| continue; "$@"; done'
)


def test_a_job_that_supervises_itself(compiled: Compile, tmp_path: Path) -> None:
    """It keeps running where a node is lost, has the spare nodes, and leaves no watcher behind."""
    out = supervised(compiled, spares=1)
    script = (out / "launch/job.sh").read_text()
    assert "#SBATCH --no-kill\n" in script and "#SBATCH --nodes=3\n" in script
    programs = {"srun": WAITING_WATCH, "shardwright": 'sleep 0.3; echo "run:$*"; mkdir -p run; '}
    programs["shardwright"] += 'echo \'{"status": "done"}\' >run/status.json'
    code, printed, error = ended(job(out, tmp_path / "bin", programs=programs))
    assert (code, printed) == (0, "run:run . --resume auto --supervise\n"), error
    assert error == "watch:ended\n"
    plain = compiled({"slurm": {}})
    assert "no-kill" not in (plain / "launch/job.sh").read_text()
    assert not (plain / "launch/watch.sh").exists()


@pytest.mark.parametrize(("code", "trained"), [(75, False), (75, True), (3, False)])
def test_a_supervisor_without_enough_nodes(
    code: int, trained: bool, compiled: Compile, tmp_path: Path
) -> None:
    """75: another job without the lost nodes. Any other end of the supervisor is the run's own."""
    out = supervised(compiled)
    does = "mkdir -p run; touch -d +1minute run/metrics.jsonl; " if trained else ""
    programs = {
        "srun": WAITING_WATCH,
        "squeue": "echo n1",
        "nvidia-smi": SMI,
        "shardwright": f"{does}exit {code}",
        "sbatch": SBATCH,
    }
    process = job(out, tmp_path / "bin", "auto", "n9", "2", programs=programs, LOST="n2")
    found, printed, error = ended(process)
    assert found == code, error
    again = f"<--exclude=n9,n2><launch/job.sh><auto><n9,n2><{1 if trained else 3}>"
    assert (again in printed, "node n2: no answer" in error) == (
        (True, True) if code == 75 else (False, False)
    )
    without = supervised(compiled, requeue=False)
    found, printed, error = ended(job(without, tmp_path / "bin", programs=programs, LOST="n2"))
    assert found == code and "sbatch:" not in printed
    assert ("sbatch --exclude=n2 launch/job.sh auto" in error) == (code == 75)


def watch(out: Path, folder: Path, programs: dict[str, str], *rest: str) -> subprocess.Popen[str]:
    path = install(folder)
    expand = "IFS=,; for name in $3; do echo $name; done"
    describe = 'echo "JobState=FAILED Reason=${REASON:-None}"'
    defaults = {
        "scontrol": f'case "$1 $2" in "show hostnames") {expand} ;; "show job") {describe} ;; esac',
        "sbatch": SBATCH,
        "scancel": 'echo "scancel:$*"',
    }
    for name, text in {**defaults, **programs}.items():
        program(folder, name, text)
    return subprocess.Popen(
        ["bash", "launch/watch.sh", "n1", *rest],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=out,
        env={"PATH": path, **ALLOCATION, "SHARDWRIGHT_WATCH_SECONDS": "0.1", "REASON": REASON},
    )


REASON = "JobLaunchFailure"
AGAIN = (
    "watch.sh: node n1, on which launch/job.sh ran, is lost\n"
    "sbatch:<--dependency=afterany:12><--exclude=n9,n1><launch/job.sh><auto><n9,n1><2>\n"
    "watch.sh: submitted again without n9,n1\n"
    "scancel:12\n"
)


def watched(out: Path, process: subprocess.Popen[str]) -> str:
    """What the watcher wrote into the job's log."""
    assert ended(process) == (0, "", "")
    path = out / "run" / "slurm-12.log"
    text = path.read_text()
    path.unlink()
    return text


def test_the_first_node_is_missed(compiled: Compile, tmp_path: Path) -> None:
    """Slurm has taken it out of the job, which would run on without its script; one watcher of
    two submits the job again."""
    out = supervised(compiled)
    (out / "run").mkdir(exist_ok=True)
    looks = (
        'echo look >>looks; (($(wc -l <looks) > 2)) && echo "RUNNING n2" || echo "RUNNING n1,n2"'
    )
    process = watch(out, tmp_path / "bin", {"squeue": looks}, "n9", "1")
    assert watched(out, process) == AGAIN
    assert watched(out, watch(out, tmp_path / "bin", {"squeue": looks}, "n9", "1")) == ""
    without = supervised(compiled, requeue=False)
    (without / "run" / "replaced-12-0").rmdir()
    told = watched(without, watch(without, tmp_path / "bin", {"squeue": "echo RUNNING n2"}))
    assert "submit the job again: sbatch --exclude=n1 launch/job.sh auto\nscancel:12\n" in told


@pytest.mark.parametrize(("sent", "printed"), [("SIGUSR2", ""), ("SIGTERM", AGAIN)])
def test_the_watch_ends_with_the_job(
    sent: str, printed: str, compiled: Compile, tmp_path: Path
) -> None:
    """USR2: the script ends. TERM: Slurm has ended the job, here with the script's node. A
    controller that does not answer is no lost node."""
    out = supervised(compiled)
    (out / "run").mkdir(exist_ok=True)
    silent = "touch looked; exit 1"
    process = watch(out, tmp_path / "bin", {"squeue": silent}, "n9", "1")
    await_file(out / "looked")
    assert process.poll() is None
    process.send_signal(getattr(signal, sent))
    assert watched(out, process) == printed


def test_sigterm_to_a_nodes_task_is_a_request_to_stop(compiled: Compile, tmp_path: Path) -> None:
    out = compiled({"slurm": {}})
    path = install(tmp_path / "bin")
    waits = "mkdir -p run; touch run/began; until [[ -e run/stop ]]; do sleep 0.05; done; sleep 0.3"
    program(tmp_path / "bin", "deepspeed", f"{waits}; echo saved; exit 4")
    process = subprocess.Popen(
        ["bash", "launch/node.sh"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=out,
        env={"PATH": path, **ALLOCATION, "SLURM_NODEID": "0", "MASTER_ADDR": "n1"},
    )
    await_file(out / "run" / "began")
    assert not (out / "run" / "stop").exists()
    process.terminate()
    code, printed, error = ended(process)
    assert (code, printed) == (4, "saved\n"), error


def test_every_script_is_valid_bash(write_recipe: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "setup.sh").write_text("true\n")
    for number, launch in enumerate(
        (
            {"slurm": {"requeue": True, "exclude": "n9"}, "setup_script": "setup.sh"},
            {"slurm": {"container": {"image": "i"}, "exclusive": False}},
            {"slurm": {"requeue": True}, "recovery": {"spares": 1}},
            {"slurm": {}, "recovery": {}},
            {"launcher": "pdsh", "setup_script": "setup.sh", "env_from": ["TOKEN"]},
            {"launcher": "pdsh"},
            {"launcher": "openmpi", "setup_script": "setup.sh"},
            {"launcher": "no_ssh", "setup_script": "setup.sh", "master_addr": "a"},
            {"kubernetes": {**KUBERNETES, "kind": "jobset"}, "setup_script": "setup.sh"},
        )
    ):
        out = tmp_path / str(number)
        recipe = load_recipe(write_recipe({**TWO_NODES, "launch": launch}))
        write_folder(out, compile_recipe(recipe).files)
        for script in out.rglob("*.sh"):
            done = subprocess.run(["bash", "-n", str(script)], capture_output=True)
            assert done.stderr == b"", script
            assert shell_warnings(script.read_bytes()) == "", script


def await_file(path: Path) -> None:
    end = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < end, f"no {path}"
        time.sleep(0.02)

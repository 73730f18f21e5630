"""The launch files of Slurm and Open MPI, run against programs that only print what they were
given, and refusals."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwright.compile.recipe_compiler import compile_recipe
from shardwright.diagnostics import Refusal
from shardwright.launch.launcher_process import run_folder
from shardwright.launch.launchers.launcher_table import unmounted_paths
from shardwright.recipe.recipe_loader import load_recipe
from tests.unit.launch.launchers.fake_programs import install, start
from tests.unit.launch.launchers.two_node_recipes import KUBERNETES, TWO_NODES, Compile


def test_slurm_options_are_the_recipes(compiled: Compile) -> None:
    options = {
        "account": "a",
        "partition": "p",
        "qos": "q",
        "time": "48:00:00",
        "requeue": True,
        "signal_seconds": 90,
    }
    job = (compiled({"slurm": {**options, "cpus_per_node": 64}}) / "launch/job.sh").read_text()
    told = {
        line.removeprefix("#SBATCH --") for line in job.splitlines() if line.startswith("#SBATCH")
    }
    assert told >= {
        "account=a",
        "partition=p",
        "qos=q",
        "time=48:00:00",
        "requeue",
        "signal=B:USR1@90",
        "nodes=2",
    }
    assert told >= {
        "gpus-per-node=2",
        "cpus-per-task=64",
        "exclusive",
        "ntasks-per-node=1",
        "job-name=small",
    }
    assert "scontrol requeue" in job
    job = (
        compiled({"slurm": {"gres": "gpu:h100:2", "exclusive": False}}) / "launch/job.sh"
    ).read_text()
    assert "--gres=gpu:h100:2\n" in job and "gpus-per-node" not in job and "exclusive" not in job
    assert "#SBATCH --no-requeue\n" in job and "scontrol requeue" not in job


def test_slurm_takes_all_of_the_memory_and_more_options(compiled: Compile) -> None:
    def told(**slurm: Any) -> set[str]:
        job = (compiled({"slurm": slurm}) / "launch/job.sh").read_text()
        return {
            line.removeprefix("#SBATCH --")
            for line in job.splitlines()
            if line.startswith("#SBATCH")
        }

    assert "mem=0" in told() and not {w for w in told(exclusive=False) if w.startswith("mem")}
    assert (
        "mem=500G" in told(mem="500G")
        and "mem=1000" in told(mem=1000)
        and "mem=0" in told(mem=0, exclusive=False)
    )
    options = {"exclude": "gpu-[3,7-9]", "constraint": "h100&(ib|roce)", "reservation": "r"}
    assert {f"{key}={value}" for key, value in options.items()} <= told(**options)
    expected = {
        "mail-type=END,FAIL",
        'comment="two words"',
        "licenses=m:2",
        "spread-job",
        "nice=10",
    }
    words = [
        "#SBATCH --mail-type=END,FAIL",
        "--comment='two words'",
        "-Lm:2",
        "spread-job",
        "--nice 10",
    ]
    assert expected <= told(extra=words)
    mapping = {
        "mail_type": "END,FAIL",
        "comment": "two words",
        "L": "m:2",
        "spread-job": True,
        "nice": 10,
    }
    assert expected <= told(extra={**mapping, "contiguous": False}) and "contiguous" not in told(
        extra=mapping
    )


def test_slurm_starts_the_ranks_in_a_container(compiled: Compile, tmp_path: Path) -> None:
    container = {
        "image": "nvcr.io#nvidia/pytorch:25.01-py3",
        "mounts": ["/data", "/raid/w:/weights:ro"],
    }
    out = compiled({"slurm": {"container": container}, "setup_script": "setup.sh"})
    assert "setup.sh" not in (out / "launch/job.sh").read_text()  # outside of the container
    allocation = {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n"}
    done = start(out, install(tmp_path / "bin"), **allocation)
    mounts = f"<--container-mounts={out}:{out},/data:/data,/raid/w:/weights:ro>"
    assert (
        f"<--container-image={container['image']}><--container-workdir={out}>{mounts}<bash>"
        in done.stdout
    )
    assert "set=-yes" in done.stdout
    moved = tmp_path / "a:b"
    out.rename(moved)
    assert (
        "pyxis cannot mount the path"
        in start(moved, install(tmp_path / "bin"), **allocation).stderr
    )


def test_slurm_job_finds_shardwright_where_the_set_up_script_puts_it(
    compiled: Compile, tmp_path: Path
) -> None:
    """A cluster may start jobs with nothing of the environment in which they were submitted."""
    path = install(tmp_path / "bin")
    (tmp_path / "bin" / "shardwright").rename(tmp_path / "bin" / "elsewhere")
    (tmp_path / "setup.sh").write_text(
        f"mkdir -p {tmp_path}/venv; ln -sf {tmp_path}/bin/elsewhere {tmp_path}/venv/shardwright\n"
        f"PATH={tmp_path}/venv:$PATH; cd /\n"
    )
    out = compiled({"launcher": "slurm", "setup_script": "setup.sh"})
    (tmp_path / "go").write_text("cd out && exec sbatch --parsable launch/job.sh auto\n")
    done = start(out, path, script="../go")
    assert done.returncode == 0, done.stderr
    assert "shardwright:<run><.><--resume><auto>" in done.stdout


def test_slurm_from_submission_to_a_nodes_ranks(compiled: Compile, tmp_path: Path) -> None:
    """sbatch -> launch/job.sh -> shardwright run -> launch.sh -> srun -> launch/node.sh ->
    deepspeed."""
    out = compiled({"launcher": "slurm", "setup_script": "setup.sh", "env": {"NOTE": "two words"}})
    path = install(tmp_path / "bin")
    (tmp_path / "go").write_text("cd out && exec sbatch --parsable launch/job.sh never\n")
    done = start(out, path, script="../go")
    assert done.returncode == 0, done.stderr
    assert "shardwright:<run><.><--resume><never>" in done.stdout
    nodes = "<--nodes=2><--ntasks=2><--ntasks-per-node=1><--cpu-bind=none><--kill-on-bad-exit=1><bash><launch/node.sh>"  # noqa: E501
    assert f"srun:<--job-name=ranks><--nodelist=n[1-2]>{nodes}" in done.stdout
    assert "<--node_rank><1><--master_addr><n1><--master_port><20012><train.py>" in done.stdout
    assert (
        f"cwd={out} addr=n1 port=20012 note=two words set=-yes" in done.stdout
    )  # wherever the set-up script went
    # Queued again, it goes on where it stopped whatever the first submission said.
    assert "<--resume><auto>" in start(out, path, script="../go", SLURM_RESTART_COUNT="1").stdout


def test_slurm_outside_an_allocation_of_the_right_size(compiled: Compile, tmp_path: Path) -> None:
    out, path = compiled({"launcher": "slurm"}), install(tmp_path / "bin")
    assert "not inside a Slurm allocation" in start(out, path).stderr
    done = start(out, path, SLURM_JOB_ID="1", SLURM_JOB_NUM_NODES="3")
    assert done.returncode == 1 and "has 3 nodes, the plan 2" in done.stderr


def test_run_submits_and_prints_the_job(
    compiled: Compile,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = compiled({"launcher": "slurm"})
    program = tmp_path / "bin" / "sbatch"
    program.parent.mkdir()
    program.write_text("#!/usr/bin/env bash\necho \"$PWD $*\" >given\necho '42;cluster'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert run_folder(out, None, "auto") == 0
    printed = capsys.readouterr().out
    assert "submitted    job 42\n" in printed and f"{out}/run/slurm-42.log" in printed
    assert (out / "given").read_text() == f"{out} --parsable launch/job.sh auto\n"
    program.write_text("#!/usr/bin/env bash\necho 'sbatch: error: invalid partition' >&2; exit 1\n")
    with pytest.raises(Refusal) as caught:
        run_folder(out, None, "auto")
    assert [d.code for d in caught.value.diagnostics] == ["SW5208"] and "invalid partition" in str(
        caught.value
    )


def test_a_hostfile_where_the_engine_reads_one(write_recipe: Callable[..., Path]) -> None:
    one = {
        "cluster": {"nodes": 1, "gpus_per_node": 1, "gpu": "cpu"},
        "parallelism": {"zero_stage": 0},
    }
    for target, wanted in (("deepspeed", "launch/hostfile"), ("reference", None)):
        compiled = compile_recipe(load_recipe(write_recipe({**one, "target": target})))
        assert compiled.plan.launch.hostfile == wanted
        assert [name for name in compiled.files if name.startswith("launch/")] == (
            [wanted] if wanted else []
        )


def test_openmpi_ranks_know_their_place(compiled: Compile, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# two\na slots=2\nb slots=2\n")
    out = compiled(
        {
            "launcher": "openmpi",
            "setup_script": "setup.sh",
            "env": {"NOTE": "x=1"},
            "env_from": ["TOKEN"],
        }
    )
    done = start(out, install(tmp_path / "bin"), "hosts", TOKEN="secret")
    assert done.returncode == 0, done.stderr
    assert (
        f"<--launcher><openmpi><--force_multi><--no_ssh_check><--hostfile><{tmp_path}/hosts>"
        in done.stdout
    )
    by_name = "-x SHARDWRIGHT_TOKEN -x TOKEN"
    assert (
        f"<--launcher_args=--map-by slot --bind-to none {by_name}><--no_python><launch/rank.sh>"
        in done.stdout
    )
    forwarded = {
        "MASTER_ADDR=a",
        "MASTER_PORT=29500",
        f"SHARDWRIGHT_PYTHON={tmp_path}/bin/python",
        "NOTE=x=1",
    }
    assert forwarded <= set(done.stdout.splitlines()) and "secret" not in done.stdout
    assert (
        "python:<-u><train.py>\nRANK=3 WORLD_SIZE=4 LOCAL_RANK=1 set=-yes note=x=1\n" in done.stdout
    )


@pytest.mark.parametrize(
    ("launch", "seen"),
    [
        ({"slurm": {"container": {"image": "i"}}}, ()),
        (
            {"slurm": {"container": {"image": "i", "mounts": ["/data", "/raid/ck:/elsewhere/ck"]}}},
            ("/data", "/elsewhere"),
        ),
        ({"kubernetes": {**KUBERNETES, "mount_path": "/shared"}}, ()),
        ({"slurm": {}}, ("/data", "/elsewhere")),
    ],
)
def test_what_a_container_does_not_mount_is_a_warning(
    launch: dict[str, Any], seen: tuple[str, ...], write_recipe: Callable[..., Path]
) -> None:
    plan = compile_recipe(
        load_recipe(write_recipe({**TWO_NODES, "launch": launch, "data": {"kind": "synthetic"}}))
    ).plan
    data = dataclasses.replace(plan.data, kind="tokens", path="/data/t.npy")
    checkpoint = dataclasses.replace(plan.checkpoint, directory="/elsewhere/ck/run")
    found = unmounted_paths(dataclasses.replace(plan, data=data, checkpoint=checkpoint))
    expected = {("data", "path"): "/data", ("checkpoint", "directory"): "/elsewhere"}
    assert [d.key for d in found] == [key for key, root in expected.items() if root not in seen]
    assert all((d.code, d.severity) == ("SW5209", "warning") for d in found)


MOUNT = ("launch", "slurm", "container", "mounts", 0)


@pytest.mark.parametrize(
    ("launch", "code", "key"),
    [
        ({"launcher": "kubernetes"}, "SW1201", ("launch", "launcher")),
        ({"launcher": "pdsh", "slurm": {}}, "SW1208", ("launch", "slurm")),
        ({"slurm": {}, "kubernetes": KUBERNETES}, "SW1208", ("launch", "kubernetes")),
        (
            {"kubernetes": {**KUBERNETES, "directory": "/else/run"}},
            "SW1213",
            ("launch", "kubernetes", "directory"),
        ),
        (
            {"kubernetes": {**KUBERNETES, "directory": "/shared/../x"}},
            "SW1213",
            ("launch", "kubernetes", "directory"),
        ),
        ({"kubernetes": KUBERNETES, "env_from": ["TOKEN"]}, "SW1213", ("launch", "env_from")),
        ({"kubernetes": {"image": "i"}}, "SW1105", ("launch", "kubernetes", "volume_claim")),
        ({"slurm": {"extra": ["--nodes=3"]}}, "SW1218", ("launch", "slurm", "extra", 0)),
        ({"slurm": {"extra": {"G": 8}}}, "SW1218", ("launch", "slurm", "extra", "G")),
        ({"slurm": {"extra": ["--mem-per-gpu=1G"]}}, "SW1218", ("launch", "slurm", "extra", 0)),
        (
            {"slurm": {"extra": {"mail-typ": "END"}}},
            "SW1219",
            ("launch", "slurm", "extra", "mail-typ"),
        ),
        ({"slurm": {"extra": ["sparkle"]}}, "SW1219", ("launch", "slurm", "extra", 0)),
        ({"slurm": {"extra": ["--hold=yes"]}}, "SW1220", ("launch", "slurm", "extra", 0)),
        ({"slurm": {"extra": ["--licenses"]}}, "SW1220", ("launch", "slurm", "extra", 0)),
        (
            {"slurm": {"extra": ["--comment=a --mail-type=END"]}},
            "SW1220",
            ("launch", "slurm", "extra", 0),
        ),
        ({"slurm": {"extra": ["--hold"] * 101}}, "SW1107", ("launch", "slurm", "extra")),
        ({"slurm": {"mem": "all"}}, "SW1106", ("launch", "slurm", "mem")),
        ({"slurm": {"container": {}}}, "SW1105", ("launch", "slurm", "container", "image")),
        ({"slurm": {"container": {"image": "i", "mounts": ["data"]}}}, "SW1106", MOUNT),
    ],
)
def test_refused(
    write_recipe: Callable[..., Path], launch: dict[str, Any], code: str, key: tuple[str, ...]
) -> None:
    with pytest.raises(Refusal) as caught:
        load_recipe(write_recipe({**TWO_NODES, "launch": launch}))
    assert (code, key) in [(d.code, d.key) for d in caught.value.diagnostics]

"""The launch files of Slurm, Open MPI and Kubernetes, run against programs that only print what they were given."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from ruamel.yaml import YAML

from shardwright.compile import compile_recipe
from shardwright.diagnostics import Refusal
from shardwright.lower.folder import write_folder
from shardwright.lower.launch import kubernetes_name
from shardwright.recipe.load import load_recipe
from shardwright.runtime.launcher import run_folder
from tests.unit.lower.shims import install, start

TWO_NODES: dict[str, Any] = {
    "cluster": {"nodes": 2, "gpus_per_node": 2, "gpu": "a100-sxm4-80gb"},
    "training.precision": "bf16",
}
KUBERNETES = {"image": "ghcr.io/me/train:1", "volume_claim": "data", "directory": "/shared/run"}
SCHEMA = json.loads(Path(__file__).with_name("kubernetes.schema.json").read_text())

Compile = Callable[..., Path]


@pytest.fixture
def compiled(write_recipe: Callable[..., Path], tmp_path: Path) -> Compile:
    (tmp_path / "setup.sh").write_text("cd /\nSET_UP=$undefined-yes; export SET_UP\nfalse\n")

    def make(launch: dict[str, Any], **changes: Any) -> Path:
        recipe = load_recipe(write_recipe({**TWO_NODES, **changes, "launch": launch}))
        write_folder(tmp_path / "out", compile_recipe(recipe).files)
        return tmp_path / "out"

    return make


def test_slurm_options_are_the_recipes(compiled: Compile) -> None:
    options = {"account": "a", "partition": "p", "qos": "q", "time": "48:00:00", "requeue": True, "signal_seconds": 90}
    job = (compiled({"slurm": {**options, "cpus_per_node": 64}}) / "launch/job.sh").read_text()
    told = {line.removeprefix("#SBATCH --") for line in job.splitlines() if line.startswith("#SBATCH")}
    assert told >= {"account=a", "partition=p", "qos=q", "time=48:00:00", "requeue", "signal=B:USR1@90", "nodes=2"}
    assert told >= {"gpus-per-node=2", "cpus-per-task=64", "exclusive", "ntasks-per-node=1", "job-name=small"}
    assert "scontrol requeue" in job
    job = (compiled({"slurm": {"gres": "gpu:h100:2", "exclusive": False}}) / "launch/job.sh").read_text()
    assert "--gres=gpu:h100:2\n" in job and "gpus-per-node" not in job and "exclusive" not in job
    assert "#SBATCH --no-requeue\n" in job and "scontrol requeue" not in job


def test_slurm_from_submission_to_a_nodes_ranks(compiled: Compile, tmp_path: Path) -> None:
    """sbatch -> launch/job.sh -> shardwright run -> launch.sh -> srun -> launch/node.sh -> deepspeed."""
    out = compiled({"launcher": "slurm", "setup_script": "setup.sh", "env": {"NOTE": "two words"}})
    path = install(tmp_path / "bin")
    (out / "run").mkdir()
    (tmp_path / "go").write_text("cd out && exec sbatch --parsable launch/job.sh never\n")
    done = start(out, path, script="../go")
    assert done.returncode == 0, done.stderr
    assert "shardwright:<run><.><--resume><never>" in done.stdout
    nodes = "<--nodes=2><--ntasks=2><--ntasks-per-node=1><--cpu-bind=none><--kill-on-bad-exit=1><bash><launch/node.sh>"
    assert f"srun:{nodes}" in done.stdout
    assert "<--node_rank><1><--master_addr><n1><--master_port><20012><train.py>" in done.stdout
    assert f"cwd={out} addr=n1 port=20012 note=two words set=-yes" in done.stdout  # wherever the set-up script went
    # Queued again, it goes on where it stopped whatever the first submission said.
    assert "<--resume><auto>" in start(out, path, script="../go", SLURM_RESTART_COUNT="1").stdout


def test_slurm_outside_an_allocation_of_the_right_size(compiled: Compile, tmp_path: Path) -> None:
    out, path = compiled({"launcher": "slurm"}), install(tmp_path / "bin")
    assert "not inside a Slurm allocation" in start(out, path).stderr
    done = start(out, path, SLURM_JOB_ID="1", SLURM_JOB_NUM_NODES="3")
    assert done.returncode == 1 and "has 3 nodes, the plan 2" in done.stderr


def test_run_submits_and_prints_the_job(
    compiled: Compile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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
    assert [d.code for d in caught.value.diagnostics] == ["SW5208"] and "invalid partition" in str(caught.value)


def test_openmpi_ranks_know_their_place(compiled: Compile, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# two\na slots=2\nb slots=2\n")
    out = compiled({"launcher": "openmpi", "setup_script": "setup.sh", "env": {"NOTE": "x=1"}, "env_from": ["TOKEN"]})
    done = start(out, install(tmp_path / "bin"), "hosts", TOKEN="secret")
    assert done.returncode == 0, done.stderr
    assert f"<--launcher><openmpi><--force_multi><--no_ssh_check><--hostfile><{tmp_path}/hosts>" in done.stdout
    assert "<--launcher_args=--map-by slot --bind-to none><--no_python><launch/rank.sh>" in done.stdout
    forwarded = {"MASTER_ADDR=a", "MASTER_PORT=29500", f"SHARDWRIGHT_PYTHON={tmp_path}/bin/python", "NOTE=x=1"}
    assert forwarded | {"TOKEN=secret"} <= set(done.stdout.splitlines())
    assert "python:<-u><train.py>\nRANK=3 WORLD_SIZE=4 LOCAL_RANK=1 set=-yes note=x=1\n" in done.stdout


def manifests(out: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(service, job), valid ones."""
    found = []
    for name in ("service", "job"):
        found.append(YAML(typ="safe").load((out / f"launch/{name}.yaml").read_text()))
        jsonschema.validate(found[-1], SCHEMA)
    return found[0], found[1]


def test_kubernetes_is_an_indexed_job_with_a_pod_a_node(compiled: Compile) -> None:
    section = {**KUBERNETES, "namespace": "team", "secret": "tokens", "restarts": 5}
    service, job = manifests(compiled({"kubernetes": section, "env_from": ["TOKEN"]}))
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    assert spec["backoffLimit"] == 10
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    # A pod's name in DNS is JOB-INDEX.SUBDOMAIN, for which the service must carry the subdomain's name.
    assert pod["subdomain"] == service["metadata"]["name"] == job["metadata"]["name"] == "small"
    assert service["spec"]["selector"] == spec["template"]["metadata"]["labels"]
    assert {"name": "MASTER_ADDR", "value": "small-0.small"} in container["env"]
    token = {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "tokens", "key": "TOKEN"}}}
    assert token in container["env"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 2}
    assert (container["image"], container["workingDir"]) == ("ghcr.io/me/train:1", "/shared/run")
    assert job["metadata"]["namespace"] == service["metadata"]["namespace"] == "team"


def test_the_schema_of_the_manifests_sees_a_misspelt_key(compiled: Compile) -> None:
    _, job = manifests(compiled({"kubernetes": KUBERNETES}))
    wrong = copy.deepcopy(job)
    wrong["spec"]["template"]["spec"]["containers"][0]["comand"] = []
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, SCHEMA)


def test_kubernetes_pod_starts_its_nodes_ranks(compiled: Compile, tmp_path: Path) -> None:
    out, path = compiled({"kubernetes": KUBERNETES}), install(tmp_path / "bin")
    done = start(out, path, script="launch/node.sh", JOB_COMPLETION_INDEX="1", MASTER_ADDR="small-0.small")
    assert "<--node_rank><1><--master_addr><small-0.small><--master_port><29500><train.py>" in done.stdout
    created = start(out, path).stdout
    assert created == "kubectl:<apply><-f><launch/service.yaml>\nkubectl:<create><-f><launch/job.yaml>\n"


@pytest.mark.parametrize(
    ("name", "expected"),
    [("Qwen3_8B.v2", "qwen3-8b-v2"), ("7b", "run-7b"), ("-a-", "a"), ("...", "run"), ("x" * 64, "x" * 52)],
)
def test_kubernetes_name(name: str, expected: str) -> None:
    assert kubernetes_name(name) == expected


@pytest.mark.parametrize(
    ("launch", "code", "key"),
    [
        ({"launcher": "kubernetes"}, "SW1201", ("launch", "launcher")),
        ({"launcher": "pdsh", "slurm": {}}, "SW1208", ("launch", "slurm")),
        ({"slurm": {}, "kubernetes": KUBERNETES}, "SW1208", ("launch", "kubernetes")),
        ({"kubernetes": {**KUBERNETES, "directory": "/else/run"}}, "SW1213", ("launch", "kubernetes", "directory")),
        ({"kubernetes": {**KUBERNETES, "directory": "/shared/../x"}}, "SW1213", ("launch", "kubernetes", "directory")),
        ({"kubernetes": KUBERNETES, "env_from": ["TOKEN"]}, "SW1213", ("launch", "env_from")),
        ({"kubernetes": {"image": "i"}}, "SW1105", ("launch", "kubernetes", "volume_claim")),
    ],
)
def test_refused(write_recipe: Callable[..., Path], launch: dict[str, Any], code: str, key: tuple[str, ...]) -> None:
    with pytest.raises(Refusal) as caught:
        load_recipe(write_recipe({**TWO_NODES, "launch": launch}))
    assert (code, key) in [(d.code, d.key) for d in caught.value.diagnostics]

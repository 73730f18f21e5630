"""The launch files of Slurm, Open MPI and Kubernetes, run against programs that only print what they were given."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet as JobSet
from ruamel.yaml import YAML

from shardwright.compile import compile_recipe
from shardwright.diagnostics import Refusal
from shardwright.ir import pod_fields
from shardwright.launch.run import run_folder
from shardwright.launchers.lower import kubernetes_name, unseen_paths
from shardwright.lower.folder import write_folder
from shardwright.recipe.load import load_recipe
from tests.unit.launchers.shims import install, start
from tools import write_pod_fields

TWO_NODES: dict[str, Any] = {
    "cluster": {"nodes": 2, "gpus_per_node": 2, "gpu": "a100-sxm4-80gb"},
    "training.precision": "bf16",
}
KUBERNETES = {"image": "ghcr.io/me/train:1", "volume_claim": "data", "directory": "/shared/run"}
SCHEMA = json.loads(Path(__file__).with_name("kubernetes.schema.json").read_text())
KUBERNETES_VERSIONS = ("1.30", write_pod_fields.VERSION)

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


def test_slurm_takes_all_of_the_memory_and_more_options(compiled: Compile) -> None:
    def told(**slurm: Any) -> set[str]:
        job = (compiled({"slurm": slurm}) / "launch/job.sh").read_text()
        return {line.removeprefix("#SBATCH --") for line in job.splitlines() if line.startswith("#SBATCH")}

    assert "mem=0" in told() and not {w for w in told(exclusive=False) if w.startswith("mem")}
    assert "mem=500G" in told(mem="500G") and "mem=1000" in told(mem=1000) and "mem=0" in told(mem=0, exclusive=False)
    options = {"exclude": "gpu-[3,7-9]", "constraint": "h100&(ib|roce)", "reservation": "r"}
    assert {f"{key}={value}" for key, value in options.items()} <= told(**options)
    expected = {"mail-type=END,FAIL", 'comment="two words"', "licenses=m:2", "spread-job", "nice=10"}
    words = ["#SBATCH --mail-type=END,FAIL", "--comment='two words'", "-Lm:2", "spread-job", "--nice 10"]
    assert expected <= told(extra=words)
    mapping = {"mail_type": "END,FAIL", "comment": "two words", "L": "m:2", "spread-job": True, "nice": 10}
    assert expected <= told(extra={**mapping, "contiguous": False}) and "contiguous" not in told(extra=mapping)


def test_slurm_starts_the_ranks_in_a_container(compiled: Compile, tmp_path: Path) -> None:
    container = {"image": "nvcr.io#nvidia/pytorch:25.01-py3", "mounts": ["/data", "/raid/w:/weights:ro"]}
    out = compiled({"slurm": {"container": container}, "setup_script": "setup.sh"})
    assert "setup.sh" not in (out / "launch/job.sh").read_text()  # outside of the container
    allocation = {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n"}
    done = start(out, install(tmp_path / "bin"), **allocation)
    mounts = f"<--container-mounts={out}:{out},/data:/data,/raid/w:/weights:ro>"
    assert f"<--container-image={container['image']}><--container-workdir={out}>{mounts}<bash>" in done.stdout
    assert "set=-yes" in done.stdout
    moved = tmp_path / "a:b"
    out.rename(moved)
    assert "pyxis cannot mount the path" in start(moved, install(tmp_path / "bin"), **allocation).stderr


def test_slurm_job_finds_shardwright_where_the_set_up_script_puts_it(compiled: Compile, tmp_path: Path) -> None:
    """A cluster may start jobs with nothing of the environment in which they were submitted."""
    path = install(tmp_path / "bin")
    (tmp_path / "bin" / "shardwright").rename(tmp_path / "bin" / "elsewhere")
    (tmp_path / "setup.sh").write_text(
        f"mkdir -p {tmp_path}/venv; ln -sf {tmp_path}/bin/elsewhere {tmp_path}/venv/shardwright\n"
        f"PATH={tmp_path}/venv:$PATH; cd /\n"
    )
    out = compiled({"launcher": "slurm", "setup_script": "setup.sh"})
    (out / "run").mkdir()
    (tmp_path / "go").write_text("cd out && exec sbatch --parsable launch/job.sh auto\n")
    done = start(out, path, script="../go")
    assert done.returncode == 0, done.stderr
    assert "shardwright:<run><.><--resume><auto>" in done.stdout


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
    by_name = "-x SHARDWRIGHT_TOKEN -x TOKEN"
    assert f"<--launcher_args=--map-by slot --bind-to none {by_name}><--no_python><launch/rank.sh>" in done.stdout
    forwarded = {"MASTER_ADDR=a", "MASTER_PORT=29500", f"SHARDWRIGHT_PYTHON={tmp_path}/bin/python", "NOTE=x=1"}
    assert forwarded <= set(done.stdout.splitlines()) and "secret" not in done.stdout
    assert "python:<-u><train.py>\nRANK=3 WORLD_SIZE=4 LOCAL_RANK=1 set=-yes note=x=1\n" in done.stdout


def published(manifest: dict[str, Any]) -> None:
    """Raises where the API does not take it. Jobs and Services by Kubernetes' OpenAPI, which the package
    kubernetes-validate ships; JobSets by the models that Kubeflow generates from JobSet's, kubeflow-trainer-api, which
    drop what they do not know, and the Job in them again by Kubernetes'."""
    if manifest["kind"] == "JobSet":
        model = JobSet.from_dict(manifest)
        assert model is not None and model.to_dict() == manifest
        for job in manifest["spec"]["replicatedJobs"]:
            published({"apiVersion": "batch/v1", "kind": "Job", **job["template"]})
    else:
        for version in KUBERNETES_VERSIONS:
            kubernetes_validate.validate(manifest, version, strict=True)


def read(path: Path) -> dict[str, Any]:
    """As kubectl reads it: YAML 1.1, in which `on` and `yes` are no texts."""
    loader = YAML(typ="safe")
    loader.version = "1.1"  # type: ignore[assignment]
    manifest: dict[str, Any] = loader.load(path.read_text())
    published(manifest)
    return manifest


def manifests(out: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(service, job), valid ones."""
    service, job = (read(out / f"launch/{name}.yaml") for name in ("service", "job"))
    for each in (service, job):
        jsonschema.validate(each, SCHEMA)  # our own, with the forms of names, which the API's does not have
    return service, job


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


def test_kubernetes_jobset_starts_all_pods_again(compiled: Compile) -> None:
    section = {**KUBERNETES, "namespace": "team", "secret": "tokens", "restarts": 5, "kind": "jobset"}
    out = compiled({"kubernetes": section, "env_from": ["TOKEN"]})
    jobset = read(out / "launch/jobset.yaml")
    assert not (out / "launch/service.yaml").exists() and not (out / "launch/job.yaml").exists()
    assert "kubectl create -f launch/jobset.yaml" in (out / "launch.sh").read_text()
    (ranks,) = jobset["spec"]["replicatedJobs"]
    job = ranks["template"]["spec"]
    assert (jobset["spec"]["failurePolicy"]["maxRestarts"], job["backoffLimit"]) == (5, 0)
    assert (job["completionMode"], job["completions"], job["template"]["spec"]["restartPolicy"]) == (
        "Indexed",
        2,
        "Never",
    )
    # A pod's name in DNS is JOBSET-REPLICATEDJOB-0-INDEX.SUBDOMAIN.
    assert jobset["spec"]["network"] == {"enableDNSHostnames": True, "subdomain": "small"}
    (container,) = job["template"]["spec"]["containers"]
    assert {"name": "MASTER_ADDR", "value": "small-ranks-0-0.small"} in container["env"]
    assert job["podFailurePolicy"]["rules"][1]["onExitCodes"]["containerName"] == container["name"]
    long = read(compiled({"kubernetes": section}, name="x" * 64) / "launch/jobset.yaml")["metadata"]["name"]
    assert len(f"{long}-ranks-0-12799-abcde") <= 63


PATCH = {
    "metadata": {"annotations": {"on": "yes"}},
    "spec": {
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "nodeSelector": {"gpu": "h100"},
        "hostNetwork": True,
        "terminationGracePeriodSeconds": None,
        "containers": [
            {
                "name": "ranks",
                "resources": {
                    "limits": {"rdma/hca_shared_devices_a": 1, "memory": "1500Gi"},
                    "requests": {"cpu": 96},
                },
                "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
                "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
                "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
            },
            {"name": "watcher", "image": "w:1"},
        ],
        "volumes": [
            {"name": "memory", "emptyDir": {"sizeLimit": "200Gi"}},
            {"name": "scratch", "hostPath": {"path": "/raid"}},
        ],
    },
}


@pytest.mark.parametrize("kind", ["job", "jobset"])
def test_kubernetes_pod_patch(kind: str, compiled: Compile) -> None:
    labels = {"kueue.x-k8s.io/queue-name": "team"}
    section = {**KUBERNETES, "kind": kind, "labels": labels, "pod_patch": PATCH}
    out = compiled({"kubernetes": section})
    manifest = read(out / f"launch/{kind}.yaml")
    assert manifest["metadata"]["labels"] == labels
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"] if kind == "jobset" else manifest["spec"]
    template, pod = job["template"], job["template"]["spec"]
    assert template["metadata"] == {"labels": {"app.kubernetes.io/name": "small"}, "annotations": {"on": "yes"}}
    assert (pod["tolerations"], pod["nodeSelector"]) == (PATCH["spec"]["tolerations"], {"gpu": "h100"})
    assert pod["hostNetwork"] is True and "terminationGracePeriodSeconds" not in pod
    ranks, watcher = pod["containers"]
    assert watcher == {"name": "watcher", "image": "w:1"}
    assert ranks["resources"]["limits"] == {"nvidia.com/gpu": 2, "rdma/hca_shared_devices_a": 1, "memory": "1500Gi"}
    assert ranks["resources"]["requests"] == {"cpu": 96}
    assert ranks["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    assert [variable["name"] for variable in ranks["env"]] == ["MASTER_ADDR", "POD_IP"]
    assert [mount["mountPath"] for mount in ranks["volumeMounts"]] == ["/shared", "/dev/shm", "/scratch"]
    memory = {"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": "200Gi"}}
    assert pod["volumes"][1:] == [memory, {"name": "scratch", "hostPath": {"path": "/raid"}}]
    assert "# NCCL and gloo share memory" in (out / f"launch/{kind}.yaml").read_text()


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
    found = unseen_paths(dataclasses.replace(plan, data=data, checkpoint=checkpoint))
    expected = {("data", "path"): "/data", ("checkpoint", "directory"): "/elsewhere"}
    assert [d.key for d in found] == [key for key, root in expected.items() if root not in seen]
    assert all((d.code, d.severity) == ("SW5209", "warning") for d in found)


RANKS = ("spec", "containers", 0)


@pytest.mark.parametrize(
    ("patch", "code", "key"),
    [
        ({"spec": {"tolaration": []}}, "SW1221", ("spec", "tolaration")),
        ({"spec": {"tolerations": [{"kee": "a"}]}}, "SW1221", ("spec", "tolerations", 0, "kee")),
        ({"spec": {"tolerations": {"key": "a"}}}, "SW1222", ("spec", "tolerations")),
        ({"spec": {"nodeSelector": {"gpu": True}}}, "SW1222", ("spec", "nodeSelector", "gpu")),
        ({"spec": {"hostNetwork": "yes"}}, "SW1222", ("spec", "hostNetwork")),
        ({"spec": {"containers": [{"image": "i"}]}}, "SW1222", RANKS),
        ({"spec": {"containers": None}}, "SW1223", ("spec", "containers")),
        ({"spec": None}, "SW1223", ("spec",)),
        ({"spec": {"containers": [{"name": "ranks", "resources": None}]}}, "SW1223", (*RANKS, "resources")),
        ({"spec": {"restartPolicy": "Always"}}, "SW1223", ("spec", "restartPolicy")),
        ({"spec": {"volumes": [{"name": "shared", "emptyDir": {}}]}}, "SW1223", ("spec", "volumes", 0)),
        ({"spec": {"containers": [{"name": "ranks", "image": "i"}]}}, "SW1223", (*RANKS, "image")),
        (
            {"spec": {"containers": [{"name": "ranks", "resources": {"limits": {"nvidia.com/gpu": 4}}}]}},
            "SW1223",
            (*RANKS, "resources", "limits", "nvidia.com/gpu"),
        ),
        (
            {"spec": {"containers": [{"name": "ranks", "env": [{"name": "TOKEN", "value": "x"}]}]}},
            "SW1223",
            (*RANKS, "env", 0),
        ),
    ],
)
def test_a_pod_patch_is_one(
    patch: dict[str, Any], code: str, key: tuple[str, ...], write_recipe: Callable[..., Path]
) -> None:
    section = {**KUBERNETES, "secret": "s", "pod_patch": patch}
    with pytest.raises(Refusal) as caught:
        load_recipe(write_recipe({**TWO_NODES, "launch": {"kubernetes": section, "env_from": ["TOKEN"]}}))
    assert [(d.code, d.key) for d in caught.value.diagnostics] == [(code, ("launch", "kubernetes", "pod_patch", *key))]


def test_the_fields_of_a_pod_are_the_published_ones() -> None:
    assert pod_fields.TABLE_FILE.read_text() == write_pod_fields.text(), "python -m tools.write_pod_fields"


@pytest.mark.parametrize("kind", ["job", "jobset"])
def test_the_schemas_of_the_manifests_see_a_misspelt_key(kind: str, compiled: Compile) -> None:
    manifest = read(compiled({"kubernetes": {**KUBERNETES, "kind": kind}}) / f"launch/{kind}.yaml")
    wrong = copy.deepcopy(manifest)
    job = wrong["spec"]["replicatedJobs"][0]["template"]["spec"] if kind == "jobset" else wrong["spec"]
    job["template"]["spec"]["containers"][0]["comand"] = []
    with pytest.raises((jsonschema.ValidationError, AssertionError)):
        published(wrong)
    with pytest.raises((jsonschema.ValidationError, AssertionError)):
        published({**manifest, "spec": {**manifest["spec"], "sped": 1}})


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


MOUNT = ("launch", "slurm", "container", "mounts", 0)


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
        ({"slurm": {"extra": ["--nodes=3"]}}, "SW1218", ("launch", "slurm", "extra", 0)),
        ({"slurm": {"extra": {"G": 8}}}, "SW1218", ("launch", "slurm", "extra", "G")),
        ({"slurm": {"extra": ["--mem-per-gpu=1G"]}}, "SW1218", ("launch", "slurm", "extra", 0)),
        ({"slurm": {"extra": {"mail-typ": "END"}}}, "SW1219", ("launch", "slurm", "extra", "mail-typ")),
        ({"slurm": {"extra": ["sparkle"]}}, "SW1219", ("launch", "slurm", "extra", 0)),
        ({"slurm": {"extra": ["--hold=yes"]}}, "SW1220", ("launch", "slurm", "extra", 0)),
        ({"slurm": {"extra": ["--licenses"]}}, "SW1220", ("launch", "slurm", "extra", 0)),
        ({"slurm": {"extra": ["--comment=a --mail-type=END"]}}, "SW1220", ("launch", "slurm", "extra", 0)),
        ({"slurm": {"extra": ["--hold"] * 101}}, "SW1107", ("launch", "slurm", "extra")),
        ({"slurm": {"mem": "all"}}, "SW1106", ("launch", "slurm", "mem")),
        ({"slurm": {"container": {}}}, "SW1105", ("launch", "slurm", "container", "image")),
        ({"slurm": {"container": {"image": "i", "mounts": ["data"]}}}, "SW1106", MOUNT),
    ],
)
def test_refused(write_recipe: Callable[..., Path], launch: dict[str, Any], code: str, key: tuple[str, ...]) -> None:
    with pytest.raises(Refusal) as caught:
        load_recipe(write_recipe({**TWO_NODES, "launch": launch}))
    assert (code, key) in [(d.code, d.key) for d in caught.value.diagnostics]

"""The manifests and pods of Kubernetes, against its published schemas and programs that only
print."""

from __future__ import annotations

import copy
import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet as JobSet
from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import (
    TrainerV1alpha1TrainJob as TrainJob,
)
from kubeflow_trainer_api.models.trainer_v1alpha1_training_runtime import (
    TrainerV1alpha1TrainingRuntime as TrainingRuntime,
)
from ruamel.yaml import YAML

from shardwright.compile.recipe_compiler import compile_recipe
from shardwright.diagnostics import Refusal
from shardwright.launch.launchers.kubernetes_kinds import KUBERNETES_KINDS
from shardwright.launch.launchers.launch_files import kubernetes_name
from shardwright.launch.launchers.launcher_table import check_launch, plan_launch
from shardwright.recipe import kubernetes_pod_patch
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.recipe.recipe_types import POD_LABEL
from tests.unit.launch.launchers.fake_programs import install, shell_warnings, start
from tests.unit.launch.launchers.two_node_recipes import KUBERNETES, TWO_NODES, Compile
from tools.generate import kubernetes_pod_fields

SCHEMA = json.loads(Path(__file__).with_name("kubernetes.schema.json").read_text())
RAYJOB_SCHEMA = json.loads(Path(__file__).with_name("rayjob.schema.json").read_text())
KUBERNETES_VERSIONS = ("1.30", kubernetes_pod_fields.VERSION)


def published(manifest: dict[str, Any]) -> None:
    """Raises where the API does not take it. Jobs and Services by Kubernetes' OpenAPI, which the
    package kubernetes-validate ships; JobSets by the models that Kubeflow generates from JobSet's,
    kubeflow-trainer-api, which drop what they do not know, and the Job in them again by
    Kubernetes'; RayJobs by KubeRay's CRD, and the pod templates in them by Kubernetes'."""
    if manifest["kind"] == "JobSet":
        model = JobSet.from_dict(manifest)
        assert model is not None and model.to_dict() == manifest
        for job in manifest["spec"]["replicatedJobs"]:
            published({"apiVersion": "batch/v1", "kind": "Job", **job["template"]})
    elif manifest["kind"] in ("TrainJob", "TrainingRuntime"):
        model = (TrainJob if manifest["kind"] == "TrainJob" else TrainingRuntime).from_dict(
            manifest
        )
        assert model is not None and model.to_dict() == manifest
        if manifest["kind"] == "TrainingRuntime":
            published({"kind": "JobSet", **manifest["spec"]["template"]})
    elif manifest["kind"] == "RayJob":
        jsonschema.validate(manifest, RAYJOB_SCHEMA)
        cluster = manifest["spec"]["rayClusterSpec"]
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            template = {"apiVersion": "v1", "kind": "PodTemplate", "template": group["template"]}
            published(template)
    else:
        for version in KUBERNETES_VERSIONS:
            kubernetes_validate.validate(manifest, version, strict=True)


def read(path: Path) -> dict[str, Any]:
    """As kubectl reads it: YAML 1.1, in which `on` and `yes` are no texts."""
    loader = YAML(typ="safe")
    loader.version = "1.1"
    manifest: dict[str, Any] = loader.load(path.read_text())
    published(manifest)
    return manifest


def manifests(out: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(service, job), valid ones."""
    service, job = (read(out / f"launch/{name}.yaml") for name in ("service", "job"))
    for each in (service, job):
        jsonschema.validate(
            each, SCHEMA
        )  # our own, with the forms of names, which the API's does not have
    return service, job


def test_kubernetes_is_an_indexed_job_with_a_pod_a_node(compiled: Compile) -> None:
    section = {**KUBERNETES, "namespace": "team", "secret": "tokens", "restarts": 5}
    service, job = manifests(compiled({"kubernetes": section, "env_from": ["TOKEN"]}))
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    assert spec["backoffLimit"] == 10
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    # A pod's name in DNS is JOB-INDEX.SUBDOMAIN, for which the service must carry the subdomain's
    # name.
    assert pod["subdomain"] == service["metadata"]["name"] == job["metadata"]["name"] == "small"
    assert service["spec"]["selector"] == {POD_LABEL: "small"}
    assert service["spec"]["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    rules = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert rules[0]["labelSelector"] == {"matchLabels": service["spec"]["selector"]}
    assert {"name": "MASTER_ADDR", "value": "small-0.small"} in container["env"]
    token = {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "tokens", "key": "TOKEN"}}}
    assert token in container["env"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 2}
    assert (container["image"], container["workingDir"]) == ("ghcr.io/me/train:1", "/shared/run")
    assert job["metadata"]["namespace"] == service["metadata"]["namespace"] == "team"


def test_kubernetes_jobset_starts_all_pods_again(compiled: Compile) -> None:
    section = {
        **KUBERNETES,
        "namespace": "team",
        "secret": "tokens",
        "restarts": 5,
        "kind": "jobset",
    }
    out = compiled({"kubernetes": section, "env_from": ["TOKEN"]})
    jobset = read(out / "launch/jobset.yaml")
    assert not (out / "launch/service.yaml").exists() and not (out / "launch/job.yaml").exists()
    assert "kubectl create -f launch/jobset.yaml" in (out / "launch.sh").read_text()
    (ranks,) = jobset["spec"]["replicatedJobs"]
    job = ranks["template"]["spec"]
    assert (jobset["spec"]["failurePolicy"]["maxRestarts"], job["backoffLimit"]) == (5, 0)
    assert (
        job["completionMode"],
        job["completions"],
        job["template"]["spec"]["restartPolicy"],
    ) == (
        "Indexed",
        2,
        "Never",
    )
    # A pod's name in DNS is JOBSET-REPLICATEDJOB-0-INDEX.SUBDOMAIN.
    assert jobset["spec"]["network"] == {"enableDNSHostnames": True, "subdomain": "small"}
    (container,) = job["template"]["spec"]["containers"]
    assert {"name": "MASTER_ADDR", "value": "small-ranks-0-0.small"} in container["env"]
    assert job["podFailurePolicy"]["rules"][1]["onExitCodes"]["containerName"] == container["name"]
    longer = read(compiled({"kubernetes": section}, name="x" * 63) / "launch/jobset.yaml")
    long = read(compiled({"kubernetes": section}, name="x" * 64) / "launch/jobset.yaml")[
        "metadata"
    ]["name"]
    assert len(f"{long}-ranks-0-12799-abcde") <= 63 and longer["metadata"]["name"] != long


def test_a_trainjob_runs_the_jobset_of_its_own_runtime(compiled: Compile) -> None:
    section = {
        **KUBERNETES,
        "namespace": "team",
        "secret": "tokens",
        "restarts": 5,
        "labels": {"kueue.x-k8s.io/queue-name": "team"},
    }
    out = compiled({"kubernetes": {**section, "kind": "trainjob"}, "env_from": ["TOKEN"]})
    train_job, runtime = (read(out / f"launch/{name}.yaml") for name in ("trainjob", "runtime"))
    assert train_job["spec"]["runtimeRef"] == {
        "apiGroup": "trainer.kubeflow.org",
        "kind": "TrainingRuntime",
        "name": runtime["metadata"]["name"],
    }
    assert train_job["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "team"}
    assert train_job["metadata"]["namespace"] == runtime["metadata"]["namespace"] == "team"
    assert runtime["spec"]["mlPolicy"] == {"numNodes": 2}
    jobset = runtime["spec"]["template"]["spec"]
    (node,) = jobset["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    # Kubeflow Trainer refuses a runtime without this label and this name of the container.
    step = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert node["template"]["metadata"]["labels"] == step
    assert [container["name"] for container in pod["containers"]] == ["node"]
    rules = node["template"]["spec"]["podFailurePolicy"]["rules"]
    assert rules[1]["onExitCodes"]["containerName"] == "node"
    assert {"name": "MASTER_ADDR", "value": "small-node-0-0.small"} in pod["containers"][0]["env"]
    # But for these names it is the JobSet that `kind: jobset` makes.
    as_jobset = compiled({"kubernetes": {**section, "kind": "jobset"}, "env_from": ["TOKEN"]})
    expected = read(as_jobset / "launch/jobset.yaml")["spec"]
    del expected["ttlSecondsAfterFinished"], node["template"]["metadata"]
    node["name"] = pod["containers"][0]["name"] = "ranks"
    rules[1]["onExitCodes"]["containerName"] = "ranks"
    pod["containers"][0]["env"][0]["value"] = "small-ranks-0-0.small"
    assert jobset == expected


def test_a_rayjob_has_a_worker_a_node(compiled: Compile, tmp_path: Path) -> None:
    section = {**KUBERNETES, "namespace": "team", "secret": "tokens", "restarts": 5}
    labels = {"kueue.x-k8s.io/queue-name": "team"}
    launch = {"kubernetes": {**section, "kind": "rayjob", "labels": labels}, "env_from": ["TOKEN"]}
    out = compiled(launch)
    job = read(out / "launch/rayjob.yaml")
    assert (job["metadata"]["namespace"], job["metadata"]["labels"]) == ("team", labels)
    spec = job["spec"]
    assert (spec["backoffLimit"], spec["shutdownAfterJobFinishes"]) == (5, True)
    assert spec["entrypoint"] == "python3 /shared/run/launch/ray_nodes.py"
    (workers,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    head = spec["rayClusterSpec"]["headGroupSpec"]
    assert [workers[key] for key in ("replicas", "minReplicas", "maxReplicas")] == [2, 2, 2]
    assert workers["rayStartParams"]["num-gpus"] == "2"
    assert head["rayStartParams"] == {"num-cpus": "0", "num-gpus": "0"}  # no ranks there
    (ranks,) = workers["template"]["spec"]["containers"]
    assert "command" not in ranks and "workingDir" not in ranks  # KubeRay's `ray start`
    token = {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "tokens", "key": "TOKEN"}}}
    assert token in ranks["env"] and ranks["resources"]["limits"] == {"nvidia.com/gpu": 2}
    for pod in (head["template"]["spec"], workers["template"]["spec"]):
        assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "data"}
        assert pod["containers"][0]["volumeMounts"][0]["mountPath"] == "/shared"
        assert pod["containers"][0]["image"] == "ghcr.io/me/train:1"
    assert "affinity" in workers["template"]["spec"]
    printed = start(out, install(tmp_path / "bin")).stdout
    assert printed == "kubectl:<create><-f><launch/rayjob.yaml>\n"
    on_node = start(
        out, install(tmp_path / "bin"), script="launch/node.sh", NODE_RANK="1", MASTER_ADDR="a"
    ).stdout
    assert "<--node_rank><1><--master_addr><a>" in on_node
    long = read(compiled(launch, name="x" * 64) / "launch/rayjob.yaml")["metadata"]["name"]
    assert len(long) == 47


@pytest.mark.parametrize(
    ("group", "script"), [("worker", "launch/node.sh"), ("head", "launch/ray_nodes.py")]
)
def test_a_ray_pod_that_is_deleted_waits_for_its_ranks_alone(
    group: str, script: str, compiled: Compile, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    section = {
        **KUBERNETES,
        "kind": "rayjob",
        "directory": str(folder),
        "mount_path": str(tmp_path),
    }
    job = read(compiled({"kubernetes": section}) / "launch/rayjob.yaml")
    cluster = job["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    pods = {"worker": workers, "head": cluster["headGroupSpec"]}
    (container,) = pods[group]["template"]["spec"]["containers"]
    command = container["lifecycle"]["preStop"]["exec"]["command"]
    (folder / "run").mkdir()
    assert subprocess.run(command, timeout=20, check=False).returncode == 0
    assert not (folder / "run/stop").exists()
    (folder / script).write_text("until [[ -e run/stop ]]; do sleep 0.1; done; sleep 1")
    ranks = subprocess.Popen(["bash", str(folder / script)], cwd=folder)
    time.sleep(0.5)
    subprocess.run(command, timeout=20, check=False)
    assert ranks.poll() == 0  # they saved first


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_pods_that_train_on_fewer_nodes(kind: str, compiled: Compile) -> None:
    section = {"kubernetes": {**KUBERNETES, "kind": kind}}
    without = compiled(section)
    assert not (without / "launch/pod.sh").exists()
    out = compiled({**section, "recovery": {"min_nodes": 1}})
    spec = read(out / KUBERNETES_KINDS[kind].pod_template)["spec"]
    jobset = spec["template"]["spec"] if kind == "trainjob" else spec
    job = jobset["replicatedJobs"][0]["template"]["spec"]
    # The pod without a node never succeeds.
    assert job["successPolicy"] == {"rules": [{"succeededCount": 1}]}
    (container,) = job["template"]["spec"]["containers"]
    assert container["command"] == ["bash", "launch/pod.sh"]
    paths = {each["name"]: each["valueFrom"]["fieldRef"]["fieldPath"] for each in container["env"]}
    assert paths == {"POD_UID": "metadata.uid", "POD_IP": "status.podIP"}
    script = (out / "launch/pod.sh").read_bytes()
    assert b"exec python -m shardwright.supervise.jobset_pods" in script
    assert not shell_warnings(script)


@pytest.mark.parametrize(
    ("kind", "recovery", "code"),
    [
        ("jobset", {"min_nodes": 1}, []),
        ("trainjob", {"retries": 9}, ["SW5222"]),
        ("jobset", {"spares": 1}, ["SW5222"]),
        ("job", {"min_nodes": 1}, ["SW5214"]),
        ("rayjob", {"retries": 3}, ["SW5214"]),
    ],
)
def test_recovery_in_kubernetes(
    kind: str, recovery: dict[str, Any], code: list[str], write_recipe: Callable[..., Path]
) -> None:
    launch = {"kubernetes": {**KUBERNETES, "kind": kind}, "recovery": recovery}
    errors = check_launch(load_recipe(write_recipe({**TWO_NODES, "launch": launch})))
    assert [each.code for each in errors] == code


def test_a_trainjob_is_created_after_its_runtime(compiled: Compile, tmp_path: Path) -> None:
    out = compiled({"kubernetes": {**KUBERNETES, "kind": "trainjob"}})
    assert start(out, install(tmp_path / "bin")).stdout == (
        "kubectl:<apply><-f><launch/runtime.yaml>\nkubectl:<create><-f><launch/trainjob.yaml>\n"
    )


@pytest.mark.parametrize(
    ("kind", "codes"), [("trainjob", ["SW5221"]), ("rayjob", ["SW5221"]), ("jobset", [])]
)
def test_a_kind_that_has_not_run_is_warned_of(
    kind: str, codes: list[str], write_recipe: Callable[..., Path]
) -> None:
    section = {**KUBERNETES, "kind": kind}
    path = write_recipe({**TWO_NODES, "launch": {"kubernetes": section}})
    warnings = compile_recipe(load_recipe(path)).warnings
    assert [each.code for each in warnings if each.code == "SW5221"] == codes


PATCH: dict[str, Any] = {
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
                "env": [
                    {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
                ],
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


@pytest.mark.parametrize("kind", list(KUBERNETES_KINDS))
def test_kubernetes_pod_patch(kind: str, compiled: Compile) -> None:
    labels = {"kueue.x-k8s.io/queue-name": "team"}
    section = {**KUBERNETES, "kind": kind, "labels": labels, "pod_patch": PATCH}
    out = compiled({"kubernetes": section})
    row = KUBERNETES_KINDS[kind]
    assert read(out / row.created)["metadata"]["labels"] == labels
    job = read(out / row.pod_template)["spec"]
    if kind == "trainjob":
        job = job["template"]["spec"]
    if kind == "rayjob":
        job = job["rayClusterSpec"]["workerGroupSpecs"][0]
    elif kind != "job":
        job = job["replicatedJobs"][0]["template"]["spec"]
    template, pod = job["template"], job["template"]["spec"]
    assert template["metadata"] == {
        "labels": {"app.kubernetes.io/name": "small", POD_LABEL: "small"},
        "annotations": {"on": "yes"},
    }
    assert (pod["tolerations"], pod["nodeSelector"]) == (
        PATCH["spec"]["tolerations"],
        {"gpu": "h100"},
    )
    assert pod["hostNetwork"] is True and "terminationGracePeriodSeconds" not in pod
    ranks, watcher = pod["containers"]
    assert watcher == {"name": "watcher", "image": "w:1"}
    assert ranks["resources"]["limits"] == {
        "nvidia.com/gpu": 2,
        "rdma/hca_shared_devices_a": 1,
        "memory": "1500Gi",
    }
    assert ranks["resources"]["requests"] == {"cpu": 96}
    assert ranks["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    first = "RAY_memory_monitor_refresh_ms" if kind == "rayjob" else "MASTER_ADDR"
    assert [variable["name"] for variable in ranks["env"]] == [first, "POD_IP"]
    assert [mount["mountPath"] for mount in ranks["volumeMounts"]] == [
        "/shared",
        "/dev/shm",
        "/scratch",
    ]
    memory = {"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": "200Gi"}}
    assert pod["volumes"][1:] == [memory, {"name": "scratch", "hostPath": {"path": "/raid"}}]
    assert "# NCCL and gloo share memory" in (out / row.pod_template).read_text()


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
        (
            {"spec": {"containers": [{"name": "ranks", "resources": None}]}},
            "SW1223",
            (*RANKS, "resources"),
        ),
        ({"spec": {"restartPolicy": "Always"}}, "SW1223", ("spec", "restartPolicy")),
        (
            {"spec": {"volumes": [{"name": "shared", "emptyDir": {}}]}},
            "SW1223",
            ("spec", "volumes", 0),
        ),
        ({"spec": {"containers": [{"name": "ranks", "image": "i"}]}}, "SW1223", (*RANKS, "image")),
        (
            {
                "spec": {
                    "containers": [
                        {"name": "ranks", "resources": {"limits": {"nvidia.com/gpu": 4}}}
                    ]
                }
            },
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
        load_recipe(
            write_recipe({**TWO_NODES, "launch": {"kubernetes": section, "env_from": ["TOKEN"]}})
        )
    assert [(d.code, d.key) for d in caught.value.diagnostics] == [
        (code, ("launch", "kubernetes", "pod_patch", *key))
    ]


def test_the_fields_of_a_pod_are_the_published_ones() -> None:
    assert kubernetes_pod_patch.TABLE_FILE.read_text() == kubernetes_pod_fields.text(), (
        "run `make generated`"
    )


@pytest.mark.parametrize("kind", ["job", "jobset"])
def test_the_schemas_of_the_manifests_see_a_misspelt_key(kind: str, compiled: Compile) -> None:
    manifest = read(compiled({"kubernetes": {**KUBERNETES, "kind": kind}}) / f"launch/{kind}.yaml")
    wrong = copy.deepcopy(manifest)
    job = (
        wrong["spec"]["replicatedJobs"][0]["template"]["spec"]
        if kind == "jobset"
        else wrong["spec"]
    )
    job["template"]["spec"]["containers"][0]["comand"] = []
    with pytest.raises((jsonschema.ValidationError, AssertionError)):
        published(wrong)
    with pytest.raises((jsonschema.ValidationError, AssertionError)):
        published({**manifest, "spec": {**manifest["spec"], "sped": 1}})


def test_kubernetes_pod_starts_its_nodes_ranks(compiled: Compile, tmp_path: Path) -> None:
    out, path = compiled({"kubernetes": KUBERNETES}), install(tmp_path / "bin")
    done = start(
        out, path, script="launch/node.sh", JOB_COMPLETION_INDEX="1", MASTER_ADDR="small-0.small"
    )
    assert (
        "<--node_rank><1><--master_addr><small-0.small><--master_port><29500><train.py>"
        in done.stdout
    )
    created = start(out, path).stdout
    assert (
        created
        == "kubectl:<apply><-f><launch/service.yaml>\nkubectl:<create><-f><launch/job.yaml>\n"
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Qwen3_8B.v2", "qwen3-8b-v2"),
        ("7b", "run-7b"),
        ("-a-", "a"),
        ("...", "run"),
        ("x" * 52, "x" * 52),
        ("x" * 64, f"{'x' * 43}-7ce10097"),
    ],
)
def test_kubernetes_name(name: str, expected: str) -> None:
    assert kubernetes_name(name) == expected


def test_names_that_are_cut_do_not_collide() -> None:
    a, b = (kubernetes_name(f"{'run-' * 14}{end}") for end in ("lr1", "lr2"))
    assert a != b and len(a) == len(b) == 52


@pytest.mark.parametrize(
    ("nodes", "kind", "expected"),
    [(3, None, "job"), (4, None, "jobset"), (64, "job", "job"), (2, "jobset", "jobset")],
)
def test_a_jobset_from_four_nodes_on(
    nodes: int, kind: str | None, expected: str, write_recipe: Callable[..., Path]
) -> None:
    section = KUBERNETES if kind is None else {**KUBERNETES, "kind": kind}
    launch = load_recipe(write_recipe({**TWO_NODES, "launch": {"kubernetes": section}})).launch
    planned = plan_launch(launch, nodes, reads_hosts=True).kubernetes
    assert planned is not None and (planned.kind, planned.restarts) == (expected, 20)


def test_four_nodes_are_compiled_to_a_jobset(compiled: Compile) -> None:
    parallelism = {"tensor": 1, "pipeline": 4, "data": 1, "zero_stage": 1, "micro_batch_size": 1}
    cluster = {**TWO_NODES["cluster"], "nodes": 4, "gpus_per_node": 1}
    out = compiled({"kubernetes": KUBERNETES}, cluster=cluster, parallelism=parallelism)
    jobset = read(out / "launch/jobset.yaml")
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] == 20
    assert jobset["spec"]["ttlSecondsAfterFinished"] == 604800
    (ranks,) = jobset["spec"]["replicatedJobs"]  # it is gone with the JobSet, not before it
    assert "ttlSecondsAfterFinished" not in ranks["template"]["spec"]
    assert "launch.kubernetes.kind: job" in (out / "launch.sh").read_text()


@pytest.mark.parametrize("kind", ["job", "jobset"])
def test_what_a_pod_asks_for(kind: str, compiled: Compile) -> None:
    out = compiled({"kubernetes": {**KUBERNETES, "kind": kind}})
    manifest = read(out / f"launch/{kind}.yaml")
    job = (
        manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
        if kind == "jobset"
        else manifest["spec"]
    )
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["automountServiceAccountToken"] is False and "dnsPolicy" not in pod
    assert container["resources"]["requests"] == {"memory": "16Gi"}  # 2 ranks
    stop = container["lifecycle"]["preStop"]["exec"]["command"]
    assert stop == ["bash", "-c", "touch /shared/run/run/stop; sleep 600"]
    assert kind == "jobset" or manifest["spec"]["ttlSecondsAfterFinished"] == 604800


@pytest.mark.parametrize("kind", ["job", "jobset"])
@pytest.mark.parametrize(
    ("patch", "policy"),
    [
        ({"hostNetwork": True}, "ClusterFirstWithHostNet"),
        ({"hostNetwork": True, "dnsPolicy": "Default"}, "Default"),
        ({"hostNetwork": False}, None),
    ],
)
def test_pods_on_their_hosts_network_find_each_other(
    kind: str, patch: dict[str, Any], policy: str | None, compiled: Compile
) -> None:
    section = {**KUBERNETES, "kind": kind, "pod_patch": {"spec": patch}}
    manifest = read(compiled({"kubernetes": section}) / f"launch/{kind}.yaml")
    job = (
        manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
        if kind == "jobset"
        else manifest["spec"]
    )
    assert job["template"]["spec"].get("dnsPolicy") == policy


def test_a_limit_of_memory_is_the_request(compiled: Compile) -> None:
    def requests(**resources: Any) -> Any:
        patch = {"spec": {"containers": [{"name": "ranks", "resources": resources}]}}
        out = compiled({"kubernetes": {**KUBERNETES, "pod_patch": patch}})
        pod = read(out / "launch/job.yaml")["spec"]["template"]["spec"]
        return pod["containers"][0]["resources"].get("requests")

    assert requests(limits={"memory": "4Gi"}) is None  # Kubernetes takes the limit
    assert requests(limits={"memory": "4Gi"}, requests={"memory": "2Gi"}) == {"memory": "2Gi"}
    assert requests(requests={"cpu": 8}) == {"memory": "16Gi", "cpu": 8}

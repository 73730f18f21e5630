"""`doctor` of folders whose hosts a scheduler chooses: what it asks, what it could not ask, whom it
leaves alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from shardwright.cli import main as cli
from shardwright.launch.launchers import job_scheduler

TWO_NODES = {"cluster.nodes": 2, "cluster.gpus_per_node": 2}
KUBERNETES = {
    "image": "i",
    "volume_claim": "data",
    "directory": "/shared/run",
    "secret": "tokens",
    "namespace": "team",
}
SINFO = "printf 'main|1\\nmain|3\\nsmall|1\\n'"


class Site:
    """A folder of programs, in front of the real ones. Each writes down how it was called; ssh
    never is."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls = folder, folder / "calls"
        folder.mkdir()
        for name in ("ssh", "pdsh"):
            self.has(name, "exit 1")

    def has(self, name: str, script: str = "true") -> None:
        program = self.folder / name
        program.write_text(f'#!/bin/bash\necho "${{0##*/}} $*" >>{self.calls}\n{script}\n')
        program.chmod(0o755)

    def called(self) -> str:
        text = self.calls.read_text() if self.calls.exists() else ""
        assert "ssh" not in text and "node-0" not in text
        return text


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    made = Site(tmp_path / "site")
    monkeypatch.setenv("PATH", f"{made.folder}:/usr/bin:/bin")
    monkeypatch.setattr(
        job_scheduler, "program_path", lambda: str(made.folder)
    )  # without the machine's own
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    return made


@pytest.fixture
def doctor(
    write_recipe: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    site: Site,
) -> Callable[..., tuple[int, dict[str, Any], Site]]:
    def examined(launch: dict[str, Any], **has: str) -> tuple[int, dict[str, Any], Site]:
        """(exit code, name of a check -> it, with its problems as "CODE message")"""
        for name, script in has.items():
            site.has(name, script)
        recipe = write_recipe({**TWO_NODES, "launch": launch})
        assert cli.main(["compile", str(recipe), "-o", str(tmp_path / "out")]) == 0
        capsys.readouterr()
        code = cli.main(["doctor", str(tmp_path / "out"), "--json"])
        checks = json.loads(capsys.readouterr().out)["checks"]
        for check in checks:
            check["problems"] = [f"{p['code']} {p['message']}" for p in check["problems"]]
        return code, {check["name"]: check for check in checks}, site

    return examined


SLURM = {"sbatch": "echo slurm 25.05.0", "srun": "true", "scontrol": "true", "sinfo": SINFO}


def test_slurm_is_asked_about_the_job(doctor: Callable[..., Any]) -> None:
    code, checks, site = doctor({"slurm": {"partition": "main"}}, **SLURM)
    assert code == 0
    assert (
        checks["commands"]["told"].endswith("slurm 25.05.0")
        and checks["partition"]["told"] == "main: 4 nodes"
    )
    assert "sbatch --test-only launch/job.sh auto" in site.called()
    assert not checks["nodes"]["checked"] and "salloc" in checks["nodes"]["told"]


def test_slurm_says_what_is_wrong(
    doctor: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    refuses = (
        '[[ $1 == --version ]] || { echo "sbatch: error: Batch job submission failed: '
        'Invalid account" >&2; exit 1; }'
    )
    code, checks, site = doctor(
        {"slurm": {"partition": "tiny,small"}}, **{**SLURM, "sbatch": refuses}
    )
    assert code == 1
    assert checks["partition"]["problems"] == [
        "SW5315 there is no partition tiny; there are main, small"
    ]
    told = "SW5315 Slurm would refuse the job: Batch job submission failed: Invalid account"
    assert checks["job"]["problems"] == [told]
    code, checks, _ = doctor({"slurm": {"partition": "small"}}, **SLURM)
    assert code == 1 and checks["partition"]["problems"] == [
        "SW5315 partition small has 1 nodes, but the plan needs 2"
    ]
    down = "echo 'slurm_load_partitions: Unable to contact slurm controller' >&2; exit 1"
    code, checks, _ = doctor({"slurm": {}}, **{**SLURM, "sinfo": down})
    assert code == 1 and checks["controller"]["problems"][0].startswith(
        "SW5314 Slurm's controller does not answer: slurm_"
    )
    assert "job" not in checks
    site.called()


def test_slurm_that_is_not_here(doctor: Callable[..., Any]) -> None:
    code, checks, site = doctor({"slurm": {}})
    assert code == 1 and len(checks["commands"]["problems"]) == 4
    assert checks["commands"]["problems"][0] == "SW5313 this machine has no `sbatch` command"
    assert site.called() == ""


def test_a_folder_on_a_disk_of_this_host_is_a_warning(
    doctor: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def mounted(kind: str) -> None:
        part = type("Part", (), {"mountpoint": "/", "fstype": kind})
        monkeypatch.setattr(psutil, "disk_partitions", lambda all: [part])

    mounted("lustre")
    code, checks, _ = doctor({"slurm": {}}, **SLURM)
    assert (
        code == 0
        and not checks["folder"]["problems"]
        and checks["folder"]["told"].endswith("on lustre")
    )
    mounted("xfs")
    code, checks, _ = doctor({"slurm": {}}, **SLURM)
    assert code == 0 and checks["folder"]["problems"][0].startswith("SW5316")


@pytest.mark.parametrize(
    ("kind", "resource"), [("job", "jobs.batch"), ("jobset", "jobsets.jobset.x-k8s.io")]
)
def test_kubernetes_is_asked_about_the_manifests(
    kind: str, resource: str, doctor: Callable[..., Any]
) -> None:
    launch = {"kubernetes": {**KUBERNETES, "kind": kind}}
    code, checks, site = doctor(
        launch, kubectl="[[ $1 != version ]] || echo 'Client Version: v1.33.0'"
    )
    assert code == 0 and checks["commands"]["told"] == "kubectl v1.33.0"
    calls = site.called()
    assert f"kubectl auth can-i create {resource} --namespace=team" in calls
    assert f"kubectl create --dry-run=server -f launch/{kind}.yaml" in calls
    assert ("apply --dry-run=server -f launch/service.yaml" in calls) == (kind == "job")
    assert "kubectl get pvc --output=name --namespace=team -- data" in calls
    assert "kubectl get secret --output=name --namespace=team -- tokens" in calls
    assert not checks["pods"]["checked"] and "/shared/run" in checks["pods"]["told"]


def test_a_trainjob_is_not_asked_about_before_its_runtime_is_there(
    doctor: Callable[..., Any],
) -> None:
    code, checks, site = doctor(
        {"kubernetes": {**KUBERNETES, "kind": "trainjob"}},
        kubectl="[[ $1 != version ]] || echo 'Client Version: v1.33.0'",
    )
    assert code == 0 and checks["job"]["told"] == "the API server takes runtime.yaml"
    calls = site.called()
    for resource in ("trainjobs", "trainingruntimes"):
        assert f"can-i create {resource}.trainer.kubeflow.org --namespace=team" in calls
    assert "kubectl apply --dry-run=server -f launch/runtime.yaml" in calls
    assert "trainjob.yaml" not in calls


def test_kubernetes_says_what_is_wrong(doctor: Callable[..., Any]) -> None:
    script = """case "$*" in
version*) ;;
*current-context) echo prod ;;
auth*) echo no; exit 1 ;;
create*) echo 'Error from server (AlreadyExists): jobs.batch "small" already exists' >&2; exit 1 ;;
*pvc*) echo 'Error from server (NotFound): persistentvolumeclaims "data" not found' >&2; exit 1 ;;
*secret*) echo 'Error from server (Forbidden): secrets is forbidden' >&2; exit 1 ;;
esac"""
    code, checks, _ = doctor({"kubernetes": KUBERNETES}, kubectl=script)
    assert code == 1
    assert checks["cluster"]["told"] == "prod answers"
    assert checks["rights"]["problems"] == [
        f"SW5315 you may not create {name}: no" for name in ("jobs.batch", "services")
    ]
    assert checks["job"]["problems"][0].startswith(
        "SW5315 Kubernetes would refuse launch/job.yaml: Error from server (Al"
    )
    assert checks["volume"]["problems"] == ["SW5315 there is no pvc 'data'"]
    assert not checks["secret"]["checked"] and "forbidden" in checks["secret"]["told"]


def test_kubernetes_without_a_cluster(doctor: Callable[..., Any]) -> None:
    code, checks, site = doctor(
        {"kubernetes": KUBERNETES}, kubectl="[[ $* == 'version --client' ]] || exit 1"
    )
    assert code == 1 and checks["cluster"]["problems"][0].startswith(
        "SW5314 no cluster answers kubectl (no context)"
    )
    assert not checks["job"]["checked"] and "dry-run" not in site.called()


def test_a_hostfile_is_refused_as_by_run(
    write_recipe: Callable[..., Path],
    tmp_path: Path,
    site: Site,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        cli.main(
            [
                "compile",
                str(write_recipe({**TWO_NODES, "launch": {"slurm": {}}})),
                "-o",
                str(tmp_path / "o"),
            ]
        )
        == 0
    )
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2\n")
    assert cli.main(["doctor", str(tmp_path / "o"), "--hostfile", str(tmp_path / "hosts")]) == 1
    assert "error[SW6003]: --hostfile cannot be used" in capsys.readouterr().err
    assert site.called() == ""


def test_without_a_launcher_each_node_is_tried_by_itself(doctor: Callable[..., Any]) -> None:
    code, checks, site = doctor({"launcher": "no_ssh"})
    assert code == 0 and checks["this machine"]["told"] == "1 of 1 hosts answer"
    assert (
        "rendezvous" not in checks
        and not checks["nodes"]["checked"]
        and "the other 1" in checks["nodes"]["told"]
    )
    assert site.called() == ""

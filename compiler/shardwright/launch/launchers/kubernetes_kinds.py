"""List what a run can be in Kubernetes (`launch.kubernetes.kind`). A new kind is a row, its
templates, and its name in the schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.recipe.recipe_types import POD_CONTAINER

MAX_SERVICE_NAME = 52
"""Characters of the name that a Service, its Job and its pods share: a pod's number follows."""
MAX_JOBSET_NAME = 43
"""Leaves room for -ranks-0-12345-abcde in the 63 characters of a pod's name."""
MAX_RAYJOB_NAME = 47
"""Characters that KubeRay takes for a RayJob's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesKind:
    """Describes a kind of object that starts the pods.

    title: its kind in a manifest. templates: path in the compiled folder -> template, beside
    launch.sh and launch/node.sh. created: the manifest that starts the pods. applied: one that must
    be there before it. pod_template: the one with the pod template.
    dry_run: those that the API server can judge before anything is created.
    resources: what the user must be allowed to create. controller: what the cluster needs beside
    Kubernetes. replicated_job: the name of the JobSet's one group of pods. container: the name of
    the ranks' container. max_name: most characters of the object's name.
    replans: whether all pods restart together, so that they can agree on a plan for fewer nodes.
    node_rank_expression: a node's number in the shell's words, where it is not that of an Indexed
    Job's pod.
    untested: how the manifests were checked, for a kind that has not run.
    """

    title: str
    templates: Mapping[str, str]
    created: str
    pod_template: str
    dry_run: tuple[str, ...]
    resources: tuple[str, ...]
    applied: str | None = None
    controller: str | None = None
    replicated_job: str | None = None
    container: str = POD_CONTAINER
    max_name: int = MAX_JOBSET_NAME
    replans: bool = False
    node_rank_expression: str | None = None
    untested: str | None = None

    @property
    def pod_infix(self) -> str:
        """Return what stands between the object's name and a pod's number."""
        return f"-{self.replicated_job}-0" if self.replicated_job else ""


KUBERNETES_KINDS: Mapping[str, KubernetesKind] = {
    "job": KubernetesKind(
        title="Job",
        templates={
            "launch/service.yaml": "kubernetes_service.yaml.j2",
            "launch/job.yaml": "kubernetes_job.yaml.j2",
        },
        created="launch/job.yaml",
        applied="launch/service.yaml",
        pod_template="launch/job.yaml",
        dry_run=("launch/job.yaml", "launch/service.yaml"),
        resources=("jobs.batch", "services"),
        max_name=MAX_SERVICE_NAME,
    ),
    "jobset": KubernetesKind(
        title="JobSet",
        templates={
            "launch/jobset.yaml": "kubernetes_jobset.yaml.j2",
            "launch/pod.sh": "kubernetes_pod.sh.j2",
        },
        replans=True,
        created="launch/jobset.yaml",
        pod_template="launch/jobset.yaml",
        dry_run=("launch/jobset.yaml",),
        resources=("jobsets.jobset.x-k8s.io",),
        controller="the JobSet controller (https://jobset.sigs.k8s.io)",
        replicated_job="ranks",
    ),
    "trainjob": KubernetesKind(
        title="TrainJob",
        templates={
            "launch/runtime.yaml": "kubernetes_training_runtime.yaml.j2",
            "launch/trainjob.yaml": "kubernetes_trainjob.yaml.j2",
            "launch/pod.sh": "kubernetes_pod.sh.j2",
        },
        replans=True,
        created="launch/trainjob.yaml",
        applied="launch/runtime.yaml",
        pod_template="launch/runtime.yaml",
        # A TrainJob whose runtime is not there is refused.
        dry_run=("launch/runtime.yaml",),
        resources=("trainjobs.trainer.kubeflow.org", "trainingruntimes.trainer.kubeflow.org"),
        controller="Kubeflow Trainer v2 (https://www.kubeflow.org/docs/components/trainer)",
        # Kubeflow Trainer asks for both names.
        replicated_job="node",
        container="node",
        untested="Kubeflow's published models (kubeflow-trainer-api 2.3)",
    ),
    "rayjob": KubernetesKind(
        title="RayJob",
        templates={
            "launch/rayjob.yaml": "kubernetes_rayjob.yaml.j2",
            "launch/ray_nodes.py": "ray_nodes.py.j2",
        },
        created="launch/rayjob.yaml",
        pod_template="launch/rayjob.yaml",
        dry_run=("launch/rayjob.yaml",),
        resources=("rayjobs.ray.io",),
        controller="the KubeRay operator (https://docs.ray.io/en/latest/cluster/kubernetes)",
        max_name=MAX_RAYJOB_NAME,
        node_rank_expression="${NODE_RANK:?launch/ray_nodes.py starts this file}",
        untested="KubeRay's published CRD (1.7)",
    ),
}

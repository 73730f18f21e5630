"""Pods of a JobSet with launch.recovery, each a process of this machine in one folder: fewer than
planned train by a plan of their own, and all train again once the missing one is there."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from shardwright.utils.child_processes import free_port, program_path
from tests.parity.harness import Case, metrics, must, recipe, shardwright, write_inputs

pytestmark = [pytest.mark.launch, pytest.mark.prove]
STEPS = 120


def start(out: Path, attempt: int, index: int, port: int) -> subprocess.Popen[str]:
    """Start what the manifest starts in a pod, with what Kubernetes tells it."""
    return subprocess.Popen(
        ["bash", "launch/pod.sh"],
        cwd=out,
        env={
            **os.environ,
            "PATH": program_path(),
            "JOB_COMPLETION_INDEX": str(index),
            "POD_UID": f"uid-{attempt}-{index}",
            "POD_IP": "127.0.0.1",
            "MASTER_PORT": str(port),
            "SHARDWRIGHT_POD_WAIT_SECONDS": "8",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_two_of_three_pods_train_until_the_third_is_there(tmp_path: Path) -> None:
    case = Case(model="llama", data=3)
    write_inputs(case, tmp_path)
    document = recipe(case, tmp_path)
    document["cluster"] |= {"nodes": 3, "gpus_per_node": 1}
    document["training"] |= {"steps": STEPS, "global_batch_size": 12}
    document["parallelism"] = {"data": 3, "zero_stage": 1, "micro_batch_size": 2}
    document["checkpoint"] = {"every_steps": 5}
    document["data"] = {"kind": "synthetic"}
    kubernetes = {"image": "i", "volume_claim": "v", "directory": "/shared/x", "kind": "jobset"}
    document["launch"] = {"kubernetes": kubernetes, "recovery": {"min_nodes": 2}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(document))
    out = tmp_path / "out"
    must(shardwright("compile", tmp_path / "recipe.yaml", "-o", out))

    port = free_port()
    pods = {index: start(out, 1, index, port) for index in (1, 2)}  # pod 0 has no node
    end = time.monotonic() + 150
    while not ((out / "run" / "metrics.jsonl").exists() and len(metrics(out)) > 2):
        codes = [pod.poll() for pod in pods.values()]
        assert codes == [None, None] and time.monotonic() < end, codes
        time.sleep(0.2)
    members = json.loads((out / "run/pods/members.json").read_text())
    assert [pod["index"] for pod in members["pods"]] == [1, 2]
    assert members["folder"] == "run/plans/nodes-2"
    pods[0] = start(out, 1, 0, port)
    ended = {index: pod.communicate(timeout=150)[0] for index, pod in pods.items()}
    assert [pod.returncode for pod in pods.values()] == [75] * 3, ended
    assert "all pods are there" in ended[1] and "train without this pod" in ended[0]
    few = len(metrics(out))
    assert 2 < few < STEPS

    # The JobSet starts all pods again.
    port = free_port()
    pods = {index: start(out, 2, index, port) for index in range(3)}
    ended = {index: pod.communicate(timeout=200)[0] for index, pod in pods.items()}
    assert [pod.returncode for pod in pods.values()] == [0] * 3, ended
    members = json.loads((out / "run/pods/members.json").read_text())
    assert members["folder"] == "." and len(members["pods"]) == 3
    assert json.loads((out / "run/status.json").read_text())["status"] == "done"

    one = tmp_path / "one"
    document["cluster"] |= {"nodes": 1}
    document["parallelism"] = {"micro_batch_size": 2}
    document["launch"] = {}
    (tmp_path / "one.yaml").write_text(json.dumps(document))
    must(shardwright("compile", tmp_path / "one.yaml", "-o", one))
    must(shardwright("run", one))
    lines, expected = metrics(out), metrics(one)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["loss"] for line in lines] == pytest.approx(
        [line["loss"] for line in expected], abs=1e-5
    )

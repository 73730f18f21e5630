"""Jobs of a real Ray cluster, whose nodes are processes of this machine: `shardwright run` submits
launch/ray_nodes.py, the job has the output of every node, and a lost node is replaced."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shardwright.utils.child_processes import free_port, program_path
from tests.parity.harness import Case, metrics, must, recipe, shardwright, write_inputs

pytestmark = [pytest.mark.launch, pytest.mark.prove]
PYTHON = os.environ.get("SHARDWRIGHT_RAY_PYTHON", sys.executable)
"""Is the Python that has Ray; this one's packages must be there too."""
INSTALL = (
    "python -m venv RAY; put the path of this environment's site-packages into a .pth file in "
    "RAY's; RAY/bin/pip install 'ray[default]'; and set SHARDWRIGHT_RAY_PYTHON=RAY/bin/python"
)
STEPS = 60


@dataclass
class Cluster:
    """A Ray cluster, and the environment in which commands reach it."""

    process: subprocess.Popen[str]
    env: dict[str, str]

    def tell(self, word: str) -> None:
        """Have the cluster `kill` its last node or `add` one."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def ray(self, *arguments: str) -> str:
        """Return what a command of `ray job` prints."""
        command = [str(Path(PYTHON).with_name("ray")), "job", *arguments]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=60)
        return done.stdout + done.stderr

    def submit(self, out: Path) -> str:
        """Submit a compiled folder; return the job's id."""
        command = [sys.executable, "-m", "shardwright", "run", str(out)]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=120)
        found = re.search(r"raysubmit_\w+", done.stdout)
        assert done.returncode == 0 and found, done.stdout + done.stderr
        return found[0]

    def wait(self, job: str, seconds: float) -> str:
        """Return the status with which a job ends, in upper case."""
        end = time.monotonic() + seconds
        while not (
            found := re.search(r"SUCCEEDED|FAILED|STOPPED", self.ray("status", job).upper())
        ):
            assert time.monotonic() < end, self.ray("logs", job)
            time.sleep(1)
        return found[0]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    if subprocess.run([PYTHON, "-c", "import ray.job_submission"], check=False).returncode:
        pytest.fail(f"{PYTHON} has no ray: {INSTALL}")
    path = f"{Path(PYTHON).parent}:{program_path()}"
    env = {**os.environ, "PATH": path, "RAY_health_check_period_ms": "1000"}
    process = subprocess.Popen(
        [PYTHON, str(Path(__file__).with_name("ray_cluster.py")), str(free_port())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=env,
    )
    assert process.stdin and process.stdout
    try:
        while not (line := process.stdout.readline()).startswith("http"):
            assert line, "the cluster does not start"
        yield Cluster(process, {**env, "RAY_API_SERVER_ADDRESS": line.strip()})
    finally:
        process.stdin.close()
        process.wait(timeout=60)


@dataclass
class Recipes:
    """The recipe of two nodes of two ranks, and the losses of one process."""

    folder: Path
    document: dict[str, Any]
    losses: list[float]

    def compile(self, out: Path, **launch: Any) -> Path:
        launch = {"launcher": "ray", **launch}
        recipe = out.with_suffix(".yaml")
        recipe.write_text(json.dumps({**self.document, "launch": launch}))
        must(shardwright("compile", recipe, "-o", out))
        return out


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> Recipes:
    folder = tmp_path_factory.mktemp("ray")
    case = Case(model="llama", data=4)
    write_inputs(case, folder)
    document = recipe(case, folder)
    document["training"] |= {"steps": STEPS, "global_batch_size": 8}
    document["checkpoint"] = {"every_steps": 5}
    document["data"] = {"kind": "synthetic"}
    document["cluster"] |= {"nodes": 1, "gpus_per_node": 1}
    document["parallelism"] = {"micro_batch_size": 2}
    (folder / "one.yaml").write_text(json.dumps(document))
    must(shardwright("compile", folder / "one.yaml", "-o", folder / "one"))
    must(shardwright("run", folder / "one"))
    document["cluster"] |= {"nodes": 2, "gpus_per_node": 2}
    document["parallelism"] |= {"data": 4}
    return Recipes(folder, document, [line["loss"] for line in metrics(folder / "one")])


def test_a_job_trains_as_one_process(cluster: Cluster, recipes: Recipes, tmp_path: Path) -> None:
    out = recipes.compile(tmp_path / "out")
    job = cluster.submit(out)
    assert cluster.wait(job, 200) == "SUCCEEDED", cluster.ray("logs", job)
    assert [line["loss"] for line in metrics(out)] == pytest.approx(recipes.losses, abs=1e-5)
    printed = cluster.ray("logs", job)
    assert f'"step": {STEPS},' in printed
    assert len(set(re.findall(r"\(Node pid=(\d+)", printed))) == 2  # lines of both nodes


def test_a_node_that_fails_ends_the_job(cluster: Cluster, recipes: Recipes, tmp_path: Path) -> None:
    out = recipes.compile(tmp_path / "out")
    script = out / "launch/node.sh"
    text = script.read_text()
    script.write_text(f'[[ $NODE_RANK == 0 ]] || {{ echo "a fault"; exit 7; }}\n{text}')
    job = cluster.submit(out)
    assert cluster.wait(job, 120) == "FAILED"
    printed = cluster.ray("logs", job)
    assert "a fault" in printed and re.search(r"node 1 \(.*\) exits with 7", printed), printed
    assert "stopping nodes [0]" in printed
    end = time.monotonic() + 40
    while left := [path for path in Path("/proc").glob("[0-9]*/cwd") if is_in(path, out)]:
        assert time.monotonic() < end, f"processes of node 0 still run: {left}"
        time.sleep(1)


def is_in(link: Path, folder: Path) -> bool:
    """Return whether a process works in a folder."""
    try:
        return link.resolve(strict=True) == folder
    except OSError:  # it has ended
        return False


def test_a_lost_node_is_replaced(cluster: Cluster, recipes: Recipes, tmp_path: Path) -> None:
    out = recipes.compile(tmp_path / "out", recovery={"retries": 2})
    job = cluster.submit(out)
    end = time.monotonic() + 120
    while not ((out / "run/metrics.jsonl").exists() and len(metrics(out)) > 10):
        assert time.monotonic() < end, cluster.ray("logs", job)
        time.sleep(0.2)
    cluster.tell("kill")
    cluster.tell("add")
    assert cluster.wait(job, 300) == "SUCCEEDED", cluster.ray("logs", job)
    assert "retry 1 of 2" in cluster.ray("logs", job)
    assert [line["loss"] for line in metrics(out)] == pytest.approx(recipes.losses, abs=1e-5)

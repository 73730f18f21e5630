"""The light commands answer at once: --help within 0.15 s and check within 0.6 s, medians of ten,
without torch. So does whatever knows the model already: its graph within 0.3 s, its plan within 2
s. Tracing the largest one may take 8 s in a new process.

Seconds of the processor, the whole process counted: the limits are the same on a machine that
others use too."""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import GOOD, tree
from tests.unit.models.factory import LLAMA_405B

ROUNDS, RUNS = 3, 10

GRAPH = """\
import json, sys
from shardwright.recipe.recipe_types import ModelSection
from shardwright.models.graph_builder import build_model_graph
config, source = json.loads(sys.argv[1]), sys.argv[2] or None
graph = build_model_graph(
    ModelSection(source=source, config=config, revision="main", weights="random", attention="auto", loss="auto")
)
assert graph.total_parameters == 405_853_388_800
heavy = {"torch", "transformers"} & sys.modules.keys()
sys.exit(f"imported {heavy}" if heavy and sys.argv[3] == "light" else 0)
"""  # noqa: E501
LIGHT = """\
import socket, sys
sys.modules |= dict.fromkeys(("torch", "transformers", "deepspeed"))  # importing them is an error
def no_network(*arguments, **options):
    sys.exit("asked the network")
socket.socket = socket.create_connection = socket.getaddrinfo = no_network
from shardwright.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def seconds(command: list[str], folder: Path, **environment: str) -> float:
    """Return processor seconds of the command and what it starts. Its byte code is written, as
    pip does, whatever the environment says."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        command,
        cwd=folder,
        check=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "", **environment},
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def light(*arguments: str, folder: Path, **environment: str) -> str:
    """stdout of a command in a process in which nothing heavy can be imported and no network is
    there."""
    command = [sys.executable, "-c", LIGHT, *arguments]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.prove
@pytest.mark.parametrize(
    ("arguments", "limit"), [(["--help"], 0.15), (["models"], 0.2), (["check", "r.yaml"], 0.6)]
)
def test_median_of_ten(arguments: list[str], limit: float, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(GOOD)
    command = [sys.executable, "-m", "shardwright", *arguments]
    seconds(command, tmp_path)  # the byte code is compiled once
    assert within(limit, RUNS, command, tmp_path)


@pytest.mark.parametrize("arguments", [["--help"], ["models", "llama"], ["check", "r.yaml"]])
def test_no_torch(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(GOOD)
    program = (
        "import sys; from shardwright.cli.main import main; code = main(sys.argv[1:]); heavy = "
        "{'torch', 'transformers', 'deepspeed', 'jinja2'} & {name.partition('.')[0] for name in "
        "sys.modules}; sys.exit(f'imported {heavy}' if heavy else code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def graph_command(kind: str) -> list[str]:
    config = None if kind == "package" else LLAMA_405B
    source = "meta-llama/Llama-3.1-405B" if kind == "package" else ""
    return [
        sys.executable,
        "-c",
        GRAPH,
        json.dumps(config),
        source,
        "heavy" if kind == "trace" else "light",
    ]


TORCH_SECONDS = 1.0
"""Tells how long the machine imported torch on which the limits of several seconds were set."""


def slowness(folder: Path) -> float:
    """How many times as long as that machine this one takes; at least 1."""
    return max(1.0, seconds([sys.executable, "-c", "import torch"], folder) / TORCH_SECONDS)


def within(limit: float, runs: int, command: list[str], folder: Path, **environment: str) -> bool:
    """Whether the median of `runs` is, in one of three rounds: another job may slow one round down,
    a command that is slow by itself fails all three."""
    for _ in range(ROUNDS):
        median = statistics.median(seconds(command, folder, **environment) for _ in range(runs))
        print(f"median {median:.3f} s, allowed {limit:.3f} s (load {os.getloadavg()[0]:.1f})")
        if median <= limit:
            return True
    return False


@pytest.mark.prove
@pytest.mark.parametrize("kind", ["package", "cache"])
def test_a_known_graph_takes_0_3_seconds_and_no_torch(kind: str, tmp_path: Path) -> None:
    """The whole process, the interpreter's own start included."""
    environment = {"SHARDWRIGHT_CACHE": str(tmp_path / "cache"), "HF_HUB_CACHE": str(tmp_path)}
    seconds(graph_command("trace" if kind == "cache" else "package"), tmp_path, **environment)
    assert within(0.3, RUNS, graph_command(kind), tmp_path, **environment)
    assert (tmp_path / "cache").exists() == (kind == "cache")


@pytest.mark.prove
def test_tracing_405b_takes_8_seconds_in_a_new_process(tmp_path: Path) -> None:
    limit = 8 * slowness(tmp_path)
    assert within(limit, 1, graph_command("trace"), tmp_path, SHARDWRIGHT_CACHE="off")


@pytest.mark.prove
def test_a_popular_model_is_planned_in_2_seconds(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "shardwright",
        "plan",
        "Qwen/Qwen3-32B",
        "--gpu",
        "h100-sxm-80gb",
        "--nodes",
        "4",
    ]
    environment = {
        "SHARDWRIGHT_CACHE": str(tmp_path / "cache"),
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "HF_TOKEN": "",
    }
    assert within(2 * slowness(tmp_path), 3, command, tmp_path, **environment)


def test_a_popular_model_is_planned_at_once_with_nothing_at_all(tmp_path: Path) -> None:
    environment = {
        "SHARDWRIGHT_CACHE": str(tmp_path / "cache"),
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "HF_TOKEN": "",
    }
    words = ["plan", "Qwen/Qwen3-32B", "--gpu", "h100-sxm-80gb", "--nodes", "4", "--json"]
    plans = json.loads(light(*words, folder=tmp_path, **environment))["plans"]
    assert plans[0]["feasible"] and plans[0]["memory"]["fits"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.prove
def test_the_second_time_a_recipe_needs_no_torch(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "r.yaml").write_text(GOOD)
    environment = {"SHARDWRIGHT_CACHE": str(tmp_path / "cache")}
    compiled = [sys.executable, "-m", "shardwright", "compile", "r.yaml", "-o", "first"]
    subprocess.run(
        compiled, cwd=tmp_path, check=True, capture_output=True, env={**os.environ, **environment}
    )
    light("compile", "r.yaml", "-o", "second", folder=tmp_path, **environment)
    assert tree(tmp_path / "second") == tree(tmp_path / "first")
    for command in ("plan", "estimate", "check"):
        light(command, "r.yaml", folder=tmp_path, **environment)

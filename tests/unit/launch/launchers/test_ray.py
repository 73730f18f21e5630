"""The launch files of Ray, with stand-ins for its program and its module."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwright.cli import main as cli
from shardwright.launch.launchers.launcher_table import check_launch
from shardwright.recipe.recipe_loader import load_recipe
from tests.unit.launch.launchers.fake_programs import install, shell_warnings, start
from tests.unit.launch.launchers.two_node_recipes import TWO_NODES, Compile

CPU = {"cluster": {"nodes": 2, "gpus_per_node": 2, "gpu": "cpu"}, "training.precision": "fp32"}
NODE = """
import sys, types
from pathlib import Path

ray = types.ModuleType("ray")
ray.remote = lambda actor: actor
for name in ("util", "util.placement_group", "util.scheduling_strategies"):
    module = sys.modules[f"ray.{name}"] = types.ModuleType(name)
    module.placement_group = module.remove_placement_group = None
    module.PlacementGroupSchedulingStrategy = None
sys.modules["ray"] = ray
names = {"__name__": "ray_nodes", "__file__": "launch/ray_nodes.py"}
exec(compile(Path("launch/ray_nodes.py").read_text(), "launch/ray_nodes.py", "exec"), names)
sys.exit(names["Node"]().run({"NODE_RANK": "1"}))
"""


def start_node(out: Path, script: str) -> subprocess.Popen[str]:
    """Start the process of a node's actor, whose node.sh is `script`."""
    (out / "launch/node.sh").write_text(script)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}  # as Ray sets it
    return subprocess.Popen(
        [sys.executable, "-c", NODE], cwd=out, env=env, stdout=subprocess.PIPE, text=True
    )


def test_the_entrypoint_knows_the_plan(compiled: Compile, tmp_path: Path) -> None:
    out = compiled({"launcher": "ray", "recovery": {"retries": 4}})
    text = (out / "launch/ray_nodes.py").read_text()
    assert 'NODES = 2\nBUNDLE = {"GPU": 2}\nRETRIES = 4\n' in text
    submit = (out / "launch.sh").read_bytes()
    assert b'ray job submit --no-wait -- python3 "$PWD"/launch/ray_nodes.py' in submit
    assert not shell_warnings(submit)
    path = install(tmp_path / "bin")
    printed = start(out, path, script="launch/node.sh", NODE_RANK="1", MASTER_ADDR="a").stdout
    assert "<--node_rank><1><--master_addr><a>" in printed
    out = compiled({"launcher": "ray"}, **CPU)
    text = (out / "launch/ray_nodes.py").read_text()
    assert 'BUNDLE = {"CPU": 2}\nRETRIES = 0\n' in text


@pytest.mark.parametrize(("script", "code"), [("exit 7", 7), ("kill -9 $$", 137), ("true", 0)])
def test_a_node_has_the_exit_code_of_its_ranks(script: str, code: int, compiled: Compile) -> None:
    out = compiled({"launcher": "ray"})
    node = start_node(out, f"echo node $NODE_RANK threads ${{OMP_NUM_THREADS:-all}}; {script}")
    printed, _ = node.communicate(timeout=30)
    assert (node.returncode, printed) == (code, "node 1 threads all\n")


@pytest.mark.prove
def test_ranks_end_with_their_actor(compiled: Compile, tmp_path: Path) -> None:
    out = compiled({"launcher": "ray"})
    told = tmp_path / "told"
    node = start_node(out, f"trap 'touch {told}; exit' INT; echo up; while :; do sleep 0.1; done")
    assert node.stdout and node.stdout.readline() == "up\n"
    time.sleep(0.5)  # the watch starts after the ranks
    node.send_signal(signal.SIGKILL)
    end = time.monotonic() + 15
    while not told.exists():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("recovery", "keys"),
    [({"retries": 3}, []), ({"min_nodes": 1, "on": ["rank"]}, ["min_nodes", "on"])],
)
def test_recovery_that_the_entrypoint_does_not_have(
    recovery: dict[str, Any], keys: list[str], write_recipe: Callable[..., Path]
) -> None:
    launch = {"launcher": "ray", "recovery": recovery}
    errors = check_launch(load_recipe(write_recipe({**TWO_NODES, "launch": launch})))
    assert [(d.code, d.key) for d in errors] == [
        ("SW5222", ("launch", "recovery", key)) for key in keys
    ]


def test_run_submits_and_doctor_asks(
    compiled: Compile,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    out = compiled({"launcher": "ray"})
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert cli.main(["doctor", str(out)]) == 1
    assert "no `ray` command" in capfd.readouterr().out
    folder = tmp_path / "service"
    folder.mkdir()
    program = folder / "ray"
    program.write_text('#!/bin/bash\necho "ran ${0##*/} $*"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    assert cli.main(["doctor", str(out)]) == 0
    assert "takes jobs" in capfd.readouterr().out
    assert cli.main(["run", str(out)]) == 0
    printed = capfd.readouterr().out
    assert f"ran ray job submit --no-wait -- python3 {out}/launch/ray_nodes.py" in printed
    assert cli.main(["run", str(out), "--resume", "never"]) == 1
    assert "SW5208" in capfd.readouterr().err
    program.write_text('#!/bin/bash\n[[ $1 == job ]] || exit 0\necho "no route" >&2\nexit 1\n')
    assert cli.main(["doctor", str(out)]) == 1
    assert "no Ray cluster takes jobs: no route" in capfd.readouterr().out

"""`doctor` of this machine, and what it refuses before it tries anything."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shardwright.cli import main as cli
from tests.parity.harness import must, shardwright


@pytest.mark.launch
def test_one_machine(write_recipe: Callable[..., Path], tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.zeros((8, 32), dtype=np.int32))
    changes = {"data": {"kind": "tokens", "path": "tokens.npy"}, "launch.env.GLOO_SOCKET_IFNAME": "lo"}
    must(shardwright("compile", write_recipe(changes), "-o", tmp_path / "out"))
    well = must(shardwright("doctor", tmp_path / "out"))
    assert "all is well" in well.stdout and "\nred" not in well.stdout
    assert not list((tmp_path / "out" / "run").glob(".doctor-*"))

    (tmp_path / "tokens.npy").unlink()
    changes["launch.env.GLOO_SOCKET_IFNAME"] = "ens77"
    np.save(tmp_path / "tokens.npy", np.zeros((8, 32), dtype=np.int32))
    must(shardwright("compile", write_recipe(changes), "-o", tmp_path / "out"))
    (tmp_path / "tokens.npy").unlink()
    ill = shardwright("doctor", tmp_path / "out", "--json")
    assert ill.returncode == 1
    problems = [p for check in json.loads(ill.stdout)["checks"] for p in check["problems"]]
    assert [p["code"] for p in problems] == ["SW5311", "SW5307"]
    assert str(tmp_path / "tokens.npy") in problems[0]["message"] and "ens77" in problems[1]["message"]


@pytest.fixture
def two_nodes(write_recipe: Callable[..., Path], tmp_path: Path) -> Path:
    recipe = write_recipe({"cluster.nodes": 2, "cluster.gpus_per_node": 2})
    assert cli.main(["compile", str(recipe), "-o", str(tmp_path / "out")]) == 0
    return tmp_path / "out"


@pytest.mark.parametrize(
    ("hostfile", "code", "words"),
    [
        (None, "SW6003", "no hostfile says which"),
        ("a slots=2\n", "SW5203", "1 host, and the plan has 2 nodes"),
        ("a slots=2\nb slots=4\n", "SW5203", "line 2: b has slots=4"),
        ("a slots=2\na slots=2\n", "SW5202", "hostfile line 2"),
        ("a slots=2\nb slots=two\n", "SW5201", "hostfile line 2"),
    ],
)
def test_a_hostfile_that_is_not_the_plan_s_cluster(
    hostfile: str | None, code: str, words: str, two_nodes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = []
    if hostfile is not None:
        (tmp_path / "hosts").write_text(hostfile)
        given = ["--hostfile", str(tmp_path / "hosts")]
    assert cli.main(["doctor", str(two_nodes), *given]) == 1
    error = capsys.readouterr().err
    assert f"error[{code}]" in error and words in error


def test_without_ssh(
    two_nodes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2\n")
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    assert cli.main(["doctor", str(two_nodes), "--hostfile", str(tmp_path / "hosts")]) == 1
    assert "error[SW5301]" in capsys.readouterr().err

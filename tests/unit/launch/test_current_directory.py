"""No process that a command starts imports from the directory that the user happens to be in."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwright.compile.compiled_folder import write_folder
from shardwright.compile.recipe_compiler import compile_recipe
from shardwright.diagnostics import Refusal
from shardwright.launch.host_probe import Probe, ProbeRequest
from shardwright.launch.launcher_process import run_detached
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.verify.layout_verification import _launch


@pytest.fixture
def refused(write_recipe: Callable[..., Path], tmp_path: Path) -> Path:
    """A compiled folder whose run is refused within a second or two: nothing here can start the
    other nodes."""
    changes = {"cluster.nodes": 2, "cluster.gpus_per_node": 2, "launch.launcher": "no_ssh"}
    write_folder(tmp_path / "out", compile_recipe(load_recipe(write_recipe(changes))).files)
    return tmp_path / "out"


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with modules that leave a file where they are imported."""
    folder = tmp_path / "downloads"
    folder.mkdir()
    plant(folder)
    monkeypatch.chdir(folder)
    return folder


def plant(folder: Path) -> None:
    for name in ("torch", "json", "argparse", "pydantic", "deepspeed", "socket", "hashlib"):
        (folder / f"{name}.py").write_text(
            f"open({str(folder / 'pwned')!r}, 'a').write('{name} ')\n"
        )


def test_run_detach(refused: Path, hostile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_detached(refused, None, "auto") == 1
    assert "error[SW6005]" in capsys.readouterr().err
    assert not (hostile / "pwned").exists()


def test_verify(refused: Path, hostile: Path) -> None:
    with pytest.raises(Refusal) as caught:
        _launch(refused)
    assert "error[SW6005]" in caught.value.diagnostics[0].message
    assert not (hostile / "pwned").exists()


def test_doctor(refused: Path, hostile: Path) -> None:
    probe = Probe("localhost", reach="local")
    try:
        request = ProbeRequest(
            folder=str(refused),
            checkpoints="checkpoints",
            mark="m",
            cpu=True,
            inputs=(),
            port=None,
            environment={},
        )
        probe.ask(request)
        probe.wait("facts", time.monotonic() + 30)
        assert probe.result.facts.digest is not None, probe.result.problem
    finally:
        probe.close()
    assert not (hostile / "pwned").exists()

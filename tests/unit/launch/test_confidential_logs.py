"""What a run keeps of its ranks' words: without the values of launch.env_from, for this user's eyes
alone."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwright.compile.recipe_compiler import compile_recipe
from shardwright.launch.launcher_process import _stream
from shardwright.plan.plan import Plan
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.train.training_worker import _failure_event, _redirect_output

SECRET = "hf_canary-0123456789"


@pytest.fixture
def plan(write_recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.setenv("TEST_TOKEN", SECRET)
    return compile_recipe(load_recipe(write_recipe({"launch": {"env_from": ["TEST_TOKEN"]}}))).plan


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_launchers_log_and_the_terminal(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "run" / "launcher.log"
    log.parent.mkdir()
    log.write_text("of another attempt\n")
    log.chmod(0o644)
    said: Any = SimpleNamespace(stdout=iter([f"ValueError: 401 for {SECRET}\n"]))
    _stream(said, plan, tmp_path)
    told = capsys.readouterr()
    assert log.read_text() == "ValueError: 401 for [TEST_TOKEN]\n" and mode(log) == 0o600
    assert "401 for [TEST_TOKEN]" in told.out + told.err and SECRET not in told.out + told.err


def test_what_a_rank_says_of_its_failure(plan: Plan, tmp_path: Path) -> None:
    try:
        raise ValueError(f"401 for {SECRET}")
    except ValueError as error:
        event = _failure_event(plan, tmp_path, 1, error)
    assert event.cause == "ValueError: 401 for [TEST_TOKEN]"
    assert "[TEST_TOKEN]" in event.traceback and SECRET not in event.traceback


def test_a_ranks_own_log(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        os.umask(0o022)
        _redirect_output(tmp_path / "logs" / "rank-00001.log")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert mode(tmp_path / "logs" / "rank-00001.log") == 0o600

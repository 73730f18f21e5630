"""Values of launch.env_from: taken from a file that is this user's alone, blotted out of what a run
tells."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardwright.diagnostics import Refusal
from shardwright.train.secret_environment import (
    ENV_FILE_VARIABLE,
    READ_ENV_FILE_VARIABLE,
    load_secret_environment,
    remove_secret_environment_file,
    restart_with_secret_environment,
    secret_redactor,
)

RANK = """
import os
from shardwright.train.secret_environment import remove_secret_environment_file
from shardwright.train.secret_environment import restart_with_secret_environment
assert restart_with_secret_environment() is None
print(os.getpid(), os.environ["TOKEN"], os.environ.get("SHARDWRIGHT_ENV_FILE"))
remove_secret_environment_file()
"""


def written(path: Path, mode: int = 0o600) -> Path:
    path.write_bytes(b'TOKEN=two words\nand a line = "x"\0PYTHONPATH=/of/the/recipe\0')
    path.chmod(mode)
    return path


def test_a_rank_begins_again_with_them_and_removes_the_file(tmp_path: Path) -> None:
    path = written(tmp_path / "values")
    (tmp_path / "rank.py").write_text(
        RANK + "import sys; print(sys.path.count('/of/the/recipe'), sys.argv[1:])"
    )
    rank = subprocess.Popen(
        [sys.executable, "-u", str(tmp_path / "rank.py"), "--local_rank=1"],
        env={**os.environ, ENV_FILE_VARIABLE: str(path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    told, _ = rank.communicate(timeout=60)
    assert rank.returncode == 0
    assert told == f"{rank.pid} two words\nand a line = \"x\" None\n1 ['--local_rank=1']\n"
    assert not path.exists()


@pytest.mark.parametrize("fault", ["absent", "readable by all", "a link", "a pipe"])
def test_what_is_not_this_users_alone_is_refused(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "values"
    if fault == "readable by all":
        written(path, 0o644)
    elif fault == "a link":
        path.symlink_to(written(tmp_path / "elsewhere"))
    elif fault == "a pipe":
        os.mkfifo(path, 0o600)
    monkeypatch.setenv(ENV_FILE_VARIABLE, str(path))
    refusal = restart_with_secret_environment()
    assert isinstance(refusal, Refusal)
    assert [d.code for d in refusal.diagnostics] == ["SW6012"] and str(path) in refusal.diagnostics[
        0
    ].message
    assert ENV_FILE_VARIABLE not in os.environ and READ_ENV_FILE_VARIABLE not in os.environ


def test_a_loop_of_ones_own_has_them_from_there_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "values")
    for name in ("TOKEN", "PYTHONPATH", READ_ENV_FILE_VARIABLE):
        monkeypatch.setenv(name, "before")  # put back afterwards
    monkeypatch.setenv(ENV_FILE_VARIABLE, str(path))
    load_secret_environment()
    assert (
        os.environ["TOKEN"].startswith("two words")
        and ENV_FILE_VARIABLE not in os.environ
        and path.exists()
    )
    remove_secret_environment_file()
    assert not path.exists()
    load_secret_environment()


def test_without_a_file_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV_FILE_VARIABLE, raising=False)
    assert restart_with_secret_environment() is None


def test_values_are_blotted_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "TOKEN": "hf_abcdef",
        "LONGER": "hf_abcdefgh",
        "FLAG": "1",
        "KEY": "line one\nline 2",
    }.items():
        monkeypatch.setenv(name, value)
    blot = secret_redactor(("TOKEN", "LONGER", "FLAG", "KEY", "UNSET"))
    assert blot("401 for hf_abcdefgh, hf_abcdef at 1") == "401 for [LONGER], [TOKEN] at 1"
    assert blot("line one\n") == "[KEY]\n" and blot("line 2\n") == "[KEY]\n"
    assert secret_redactor(())("hf_abcdef") == "hf_abcdef"

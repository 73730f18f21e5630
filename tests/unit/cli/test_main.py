"""The command line's frame: exit codes, what is printed where, and what is not imported."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwright.cli import main as cli
from shardwright.cli.terminal import use_color
from shardwright.diagnostics import Diagnostic, Refusal
from shardwright.recipe.recipe_schema import schema_text
from tests.unit.recipe.test_bad_input import GOOD


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    (tmp_path / "good.yaml").write_text(GOOD)
    return str(tmp_path / "good.yaml")


@pytest.fixture
def bad(tmp_path: Path) -> str:
    (tmp_path / "bad.yaml").write_text(GOOD.replace("steps: 20", "stepz: 20"))
    return str(tmp_path / "bad.yaml")


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in cli.COMMANDS)
    assert cli.main(["--version"]) == 0
    assert re.fullmatch(r"shardwright \d+\.\d+\.\d+\n", capsys.readouterr().out)
    assert cli.main(["check", "--help"]) == 0


def test_help_is_aligned_and_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    rows = [re.fullmatch(r"  (?:-\w, --)?[\w-]+ {2,}(?=\S)(.*)", line) for line in lines]
    places = [row.start(1) for row in rows if row is not None]
    assert len(places) == len(cli.COMMANDS) + 2 and len(set(places)) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "usage:"),
        (["chekc"], "did you mean `check`?"),
        (["--chek"], "unknown option --chek"),
        (["xyzzy"], "`shardwright --help` lists"),
        (["a\x1b[31m"], "`a␛[31m`"),
        (["check"], "required: RECIPE"),
        (["check", "--jsn", "r"], "--jsn"),
        (["check", "--js", "r"], "--js"),
    ],
)
def test_usage_errors_exit_1(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 1
    out, err = capsys.readouterr()
    assert words in err and out == "" and "Traceback" not in err


def test_check(recipe: str, bad: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", recipe]) == 0
    assert capsys.readouterr() == (f"ok {recipe}: weights random (from scratch)\n", "")
    assert cli.main(["check", bad, recipe, "none.yaml"]) == 1
    out, err = capsys.readouterr()
    assert out == f"ok {recipe}: weights random (from scratch)\n"
    assert err.startswith(
        f"error[SW1101]: unknown key `stepz` in `training`\n  --> {bad}:12:3\n   |\n12 |   "
        "stepz: 20\n"
    )
    assert "error[SW1001]" in err and "Traceback" not in err


def test_check_looks_for_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "r.yaml").write_text(GOOD + "data: {kind: tokens, path: none.npy}\n")
    assert cli.main(["check", str(tmp_path / "r.yaml")]) == 1
    assert "error[SW1301]" in capsys.readouterr().err


def test_check_json(recipe: str, bad: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--json", "--set", "training.seed=a", recipe, bad]) == 1
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["recipe"] for row in rows] == [recipe, bad]
    assert [[(d["code"], d["file"], d["line"]) for d in row["diagnostics"]] for row in rows] == [
        [("SW1102", "--set", 1)],
        [("SW1101", bad, 12), ("SW1102", "--set", 1)],
    ]
    assert cli.main(["check", "--json", recipe]) == 0
    assert json.loads(capsys.readouterr().out) == {"recipe": recipe, "ok": True, "diagnostics": []}


def test_schema(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["schema"]) == 0
    assert capsys.readouterr().out == schema_text()
    assert cli.main(["schema", "-o", str(tmp_path / "s.json")]) == 0
    assert (tmp_path / "s.json").read_text() == schema_text()
    assert cli.main(["schema", "-o", str(tmp_path / "none" / "s.json")]) == 1
    assert "cannot write" in capsys.readouterr().err


def raising(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(args: argparse.Namespace) -> int:
        raise error

    module = types.ModuleType(f"{cli.__package__}.raise_command")
    no_arguments: Callable[[argparse.ArgumentParser], None] = lambda parser: None  # noqa: E731
    module.add_raise_arguments, module.run_raise = no_arguments, run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(cli.COMMANDS, "raise", cli.Command("", "raise_command", "raise"))


def test_our_fault_is_one_paragraph_and_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    raising(ZeroDivisionError("\ud800 secret"), monkeypatch)
    assert cli.main(["raise"]) == 2
    err = capsys.readouterr().err
    (report,) = tmp_path.iterdir()
    assert (
        err.count("\n") == 1
        and "our fault" in err
        and str(report) in err
        and "Traceback" not in err
    )
    assert "Traceback" in report.read_text() and "ZeroDivisionError" in report.read_text()


@pytest.mark.parametrize("error", [RecursionError(), MemoryError()])
def test_exhaustion_is_our_fault_too(
    error: Exception,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    raising(error, monkeypatch)
    assert cli.main(["raise"]) == 2


def test_refused_and_interrupted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raising(Refusal(Diagnostic(code="SW1104", message="too small")), monkeypatch)
    assert cli.main(["raise"]) == 1
    assert capsys.readouterr().err == "error[SW1104]: too small\n"
    raising(KeyboardInterrupt(), monkeypatch)
    assert cli.main(["raise"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def shardwright(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shardwright", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=60
    )


def test_a_closed_pipe_is_quiet() -> None:
    command = f"'{sys.executable}' -m shardwright schema | head -c 1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "{", "")


def test_a_terminal_that_knows_only_ascii(tmp_path: Path) -> None:
    path = tmp_path / "字.yaml"
    path.write_text(GOOD.replace("name: tiny", "name: 字"))
    done = shardwright("check", str(path), PYTHONIOENCODING="ascii")
    assert done.returncode == 1 and "SW1106" in done.stderr and "Traceback" not in done.stderr


def test_color(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal:
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert use_color(Terminal()) is True  # type: ignore[arg-type]
    monkeypatch.setenv("NO_COLOR", "1")
    assert use_color(Terminal()) is False  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "absent"),
    [
        (["--help"], ("torch", "numpy", "jsonschema", "ruamel", "shardwright.diagnostics")),
        (
            ["check", "RECIPE"],
            ("torch", "numpy", "transformers", "deepspeed", "pydantic", "jsonschema"),
        ),
        (
            ["import", "--launch", "deepspeed train.py"],
            ("torch", "numpy", "transformers", "deepspeed", "pydantic"),
        ),
        (["schema"], ("torch", "numpy", "transformers", "deepspeed", "pydantic", "ruamel")),
    ],
)
def test_light_commands_import_nothing_heavy(
    arguments: list[str], absent: tuple[str, ...], recipe: str
) -> None:
    words = [recipe if word == "RECIPE" else word for word in arguments]
    code = (
        f"import sys; from shardwright.cli.main import main; assert main({words!r}) == 0; print([n "
        f"for n in {absent!r} if n in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (0, "[]")

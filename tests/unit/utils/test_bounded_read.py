"""What a stranger wrote: pipes, devices, large files, nesting without end, thousands of wrong
keys."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwright.cli.main import main
from shardwright.utils.file_io import MAX_JSON_DEPTH, parse_json, read_regular_file
from tests.cpu_time import cpu_seconds_at_most

MANY = 4000
SECONDS_AT_MOST = 2.0
DEEP = {
    "lists": "[" * 200_000,
    "closed lists": "[" * 900 + "]" * 900,
    "objects": '{"a":' * 900 + "1" + "}" * 900,
}


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


def test_only_regular_files_are_read(tmp_path: Path, pipe: Path) -> None:
    """Without a wait: nobody writes into the pipe."""
    for path, words in (
        (pipe, "pipe or a device"),
        (Path("/dev/zero"), "pipe or a device"),
        (tmp_path, "folder"),
    ):
        with pytest.raises(OSError, match=words):
            read_regular_file(path)
    (tmp_path / "large").write_bytes(b"x" * 2049)
    with pytest.raises(OSError, match="larger than 2 KiB"):
        read_regular_file(tmp_path / "large", 2048)
    assert len(read_regular_file(tmp_path / "large", 2049)) == 2049


@pytest.mark.parametrize("text", DEEP.values(), ids=DEEP)
def test_deep_json_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        parse_json(text)


def test_json_up_to_the_limit() -> None:
    deepest = "[" * MAX_JSON_DEPTH + "1" + "]" * MAX_JSON_DEPTH
    assert json.dumps(parse_json(deepest)) == deepest
    with pytest.raises(ValueError, match="levels deep"):
        parse_json(f"[{deepest}]")


def test_pipes_are_refused_by_every_command(
    pipe: Path, write_recipe: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    name = str(pipe)
    (pipe.parent / "model").mkdir()
    os.mkfifo(pipe.parent / "model" / "config.json")
    here = write_recipe(
        {"cluster.nodes": 2, "parallelism": {}, "launch": {"hostfile": name, "setup_script": name}},
        "pipes.json",
    )
    model = write_recipe({"model": {"source": "./model", "weights": "random"}}, "model.json")
    for arguments, code in (
        (["check", name], "SW1001"),
        (["lint", name], "SW4001"),
        (["check", str(here)], "SW1302"),
        (["check", str(model)], "SW1302"),
        (["estimate", str(model)], "SW2002"),
    ):
        assert main(arguments) == 1
        printed = capsys.readouterr()
        assert code in printed.err + printed.out, arguments


@pytest.mark.parametrize("text", DEEP.values(), ids=DEEP)
def test_deep_files_are_refused_by_every_command(
    text: str, tmp_path: Path, write_recipe: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(f'{{"model_type": "llama", "x": {text}}}')
    (tmp_path / "deep.json").write_text(text)
    (tmp_path / "ds.json").write_text(f'{{"train_batch_size": 8, "zero_optimization": {text}}}')
    model = write_recipe({"model": {"source": "./model", "weights": "random"}}, "model.json")
    for arguments, code in (
        (["check", str(tmp_path / "deep.json")], "SW1011"),
        (
            ["lint", str(tmp_path / "ds.json")],
            "SW4009" if text.endswith(("}", "]")) or "{" not in text else "SW4",
        ),
        (["estimate", str(model)], "SW2002"),
    ):
        assert main(arguments) == 1
        printed = capsys.readouterr()
        assert code in printed.err + printed.out, arguments


@pytest.mark.prove
@pytest.mark.parametrize("where", ["", "training", "model.config", "extra"])
def test_thousands_of_unknown_keys_are_told_in_time(
    where: str, write_recipe: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    wrong: dict[str, Any] = {f"unknown_key_{n}": n for n in range(MANY)}
    path = write_recipe({f"{where}.{key}".lstrip("."): value for key, value in wrong.items()})
    # 0.1 to 0.7 s; 1.5 to 2 s with a suggestion for each key and lines split for each message.
    with cpu_seconds_at_most(1.2):
        main(["check", str(path)])
    if where in ("", "training"):
        assert capsys.readouterr().err.count("error[SW1101]") == MANY


@pytest.mark.prove
@pytest.mark.parametrize("section", ["", "zero_optimization"])
def test_thousands_of_unknown_ds_config_keys_are_told_in_time(
    section: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong: dict[str, Any] = {f"unknown_key_{n}": n for n in range(MANY)}
    document = {"train_batch_size": 8, **({section: wrong} if section else wrong)}
    (tmp_path / "ds.json").write_text(json.dumps(document, indent=0))
    with cpu_seconds_at_most(SECONDS_AT_MOST):
        main(["lint", str(tmp_path / "ds.json")])
    assert capsys.readouterr().err.count("unknown_key_") >= MANY

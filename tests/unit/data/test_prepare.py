"""Preparing: once for the same content, one writer at a time, and nothing half-written whatever
goes wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwright.data.data_preparation import prepare
from shardwright.data.indexed_dataset import DocumentWriter
from tests.privileges import with_disk
from tests.unit.data.data_plans import opened, part, plan, refused


def keys(folder: Path) -> set[str]:
    return {p.parent.name for p in (folder / "run" / "data").glob("*/manifest.json")}


def corpus(tmp_path: Path, text: str = "some text, again and again") -> Path:
    (tmp_path / "a.txt").write_text(text)
    return tmp_path / "a.txt"


def test_the_same_content_is_tokenized_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = plan(part("text", corpus(tmp_path)))
    opened(p, tmp_path)
    first = keys(tmp_path)
    monkeypatch.setattr(DocumentWriter, "extend", lambda *_: pytest.fail("tokenized again"))
    opened(p, tmp_path)
    monkeypatch.undo()
    assert len(first) == 1 and keys(tmp_path) == first
    corpus(tmp_path, "another text, of another size")
    assert (
        bytes(opened(p, tmp_path).train.read(np.array([0])).tokens[0].astype(np.uint8)) == b"anot"
    )
    assert len(keys(tmp_path)) == 2, "another content is another key"


def test_what_was_prepared_outlives_its_source(tmp_path: Path) -> None:
    path = corpus(tmp_path)
    p = plan(part("text", path))
    before = opened(p, tmp_path).train.read(np.arange(3)).tokens
    path.unlink()
    assert np.array_equal(opened(p, tmp_path).train.read(np.arange(3)).tokens, before)


def test_much_data_is_left_to_prepare(tmp_path: Path) -> None:
    p = plan(part("text", corpus(tmp_path, "x" * 5000)))
    code, message = refused(p, tmp_path, limit=4999)
    assert code == "SW6106" and "GPUs would wait" in message
    assert opened(p, tmp_path, limit=None).steps == 3
    assert opened(p, tmp_path, limit=10).steps == 3, "once it is there, size does not matter"


def test_two_writers_make_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    p = plan(part("text", corpus(tmp_path)))
    made: list[int] = []
    finish = DocumentWriter.finish

    def counted(self: DocumentWriter, **keywords: Any) -> Any:
        made.append(1)
        return finish(self, **keywords)

    monkeypatch.setattr(DocumentWriter, "finish", counted)
    threads = [
        threading.Thread(target=prepare, args=(p, tmp_path), kwargs={"limit_bytes": None})
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1 and len(keys(tmp_path)) == 1


def test_a_killed_writer_leaves_nothing_that_counts(tmp_path: Path) -> None:
    path = corpus(tmp_path)
    code = (
        "import os, sys; from pathlib import Path; from tests.unit.data.data_plans import *\n"
        "from shardwright.data.indexed_dataset import DocumentWriter\n"
        "DocumentWriter.finish = lambda self, **k: os.kill(os.getpid(), 9)\n"
        f"prepare(plan(part('text', {str(path)!r})), Path({str(tmp_path)!r}), limit_bytes=None)\n"
    )
    killed = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[3], env=dict(os.environ)
    )
    assert killed.returncode == -9
    data = tmp_path / "run" / "data"
    assert list(data.glob(".partial*")) and not keys(tmp_path)
    opened(plan(part("text", path)), tmp_path)
    assert not list(data.glob(".partial*")) and len(keys(tmp_path)) == 1


def test_damaged_files_are_told(tmp_path: Path) -> None:
    p = plan(part("text", corpus(tmp_path)))
    opened(p, tmp_path)
    (key,) = keys(tmp_path)
    tokens = tmp_path / "run" / "data" / key / "tokens.bin"
    tokens.write_bytes(tokens.read_bytes()[:-3])
    code, message = refused(p, tmp_path)
    assert code == "SW6120" and "tokens.bin has 23 bytes, not 26" in message


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file where a folder should be")
    assert refused(plan(part("text", corpus(tmp_path))), tmp_path)[0] == "SW6115"


@pytest.mark.parametrize("mode", ["full", "read-only"])
def test_disks_that_refuse(tmp_path: Path, mode: str) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": "x" * 1000}) + "\n" for _ in range(3000)))
    p = plan(part("jsonl", path))

    def refusals(remount: Callable[..., None]) -> None:
        if mode == "read-only":
            remount(read_only=True)
            assert refused(p, folder)[0] == "SW6115"
        else:
            assert refused(p, folder)[0] == "SW6114"
            assert not keys(folder)
            remount("16m")
            assert opened(p, folder).steps == 3, "with room it goes on"

    with_disk(folder, "256k", refusals)

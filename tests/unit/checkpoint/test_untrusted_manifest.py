"""A stranger's manifest and checksums: data, read within limits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwright.checkpoint import checkpoint_manifest as checkpoint_manifest
from shardwright.checkpoint.checkpoint_manifest import CHECKSUMS, MANIFEST, damage, read_manifest
from shardwright.checkpoint.run_history import (
    RUN_FILE,
    UNKNOWN_RUN,
    new_run_history,
    run_history_of,
    write_run_history,
)
from shardwright.cli import main as cli
from tests.unit.checkpoint.written_checkpoints import write_checkpoint


@pytest.fixture
def step(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path)


def changed(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def write(step: Path) -> None:
        document = json.loads((step / MANIFEST).read_text())
        change(document)
        (step / MANIFEST).write_text(json.dumps(document))

    return write


def fragment(document: dict[str, Any]) -> dict[str, Any]:
    shard: dict[str, Any] = document["tensors"]["w"]["shards"][0][0]
    return shard


HOSTILE: dict[str, Callable[[Path], object]] = {
    "200,000 brackets": lambda step: (step / MANIFEST).write_text("[" * 200_000),
    "200,000 brackets inside": lambda step: (step / MANIFEST).write_text(
        '{"version": 1, "tensors": ' + "[" * 200_000
    ),
    "a key of nobody's": changed(lambda d: d.update(comment="hello")),
    "a fragment with a key of nobody's": changed(lambda d: fragment(d).update(comment="hello")),
    "a step in words": changed(lambda d: d.update(step="4")),
    "a name of a megabyte": changed(lambda d: d.update(step="4" * 2**20)),
    "a list": lambda step: (step / MANIFEST).write_text("[1]"),
    "a file elsewhere": changed(lambda d: d["files"].append({"name": "../../x", "size_bytes": 1})),
    "a file from the root": changed(
        lambda d: d["files"].append({"name": "/etc/passwd", "size_bytes": 1})
    ),
    "a file that is not listed": changed(lambda d: fragment(d).update(file=7)),
    "a file from behind": changed(lambda d: fragment(d).update(file=-1)),
    "a negative start": changed(lambda d: fragment(d).update(start=-4)),
    "a shard too many": changed(lambda d: d["tensors"]["w"]["shards"].append([])),
    "no copies": changed(
        lambda d: d["tensors"]["w"]["split"].update(dimension=0, blocks=[6], sizes=[6], copies=0)
    ),
    "a cut that is none": changed(
        lambda d: d["tensors"]["w"]["split"].update(dimension=0, blocks=[6], sizes=[10**12])
    ),
    "checksums elsewhere": lambda step: (step / CHECKSUMS).write_text("0" * 64 + "  ../x\n"),
    "checksums without one": lambda step: (step / CHECKSUMS).write_text("x  manifest.json\n"),
    "checksums that are no text": lambda step: (step / CHECKSUMS).write_bytes(b"\xff\n"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_it_is_damage_in_one_line(
    kind: str, step: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    HOSTILE[kind](step)
    why = damage(step, contents=False)
    assert why and "\n" not in why and len(why) < 1000
    assert cli.main(["export", str(step), "-o", str(step.parent / "hf")]) == 1
    error = capsys.readouterr().err
    assert "error[SW6201]" in error and "Traceback" not in error


@pytest.mark.parametrize("key", ["rows", "finite", "data"])
def test_one_without_a_key_is_not_read(step: Path, key: str) -> None:
    changed(lambda d: d.pop(key))(step)
    with pytest.raises(ValueError, match=f"missing required field `{key}`"):
        read_manifest(step)


def test_one_that_is_too_large_is_not_read(step: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_manifest, "_MOST_MANIFEST_BYTES", 100)
    with pytest.raises(ValueError, match="larger than"):
        read_manifest(step)


@pytest.mark.parametrize(
    "text", ["[" * 200_000, '{"run": "a", "before": [], "mine": 1}', '{"run": 7}', "\xff"]
)
def test_a_line_that_is_none_is_of_no_known_run(text: str, step: Path) -> None:
    write_run_history(step, line := new_run_history())
    assert run_history_of(step) == line
    (step / RUN_FILE).write_text(text, encoding="latin-1")
    assert run_history_of(step) == UNKNOWN_RUN

"""Writing the compiled folder: whole or not at all, and only where it is ours."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardwright.compile.compiled_folder import MARKER, MARKER_TEXT, write_folder
from shardwright.diagnostics import Refusal
from tests.privileges import bound_by_permissions

FILES = {
    MARKER: MARKER_TEXT,
    "plan.json": b"{}\n",
    "launch.sh": b"#!/bin/sh\n",
    "model/config.json": b"{}\n",
}
WITH_TOKENIZER = {
    **FILES,
    "tokenizer/tokenizer.json": b"{}",
    "launch/hostfile": b"localhost slots=1\n",
}


def tree(directory: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()
    }


def refused(directory: Path, files: dict[str, bytes] = FILES) -> str:
    with pytest.raises(Refusal) as caught:
        write_folder(directory, files)
    (diagnostic,) = caught.value.diagnostics
    assert "\n" not in diagnostic.message and diagnostic.help
    return diagnostic.code


@pytest.mark.parametrize(
    "name", ["out", "a/b/c", "with space", "quote'\"", "$(touch pwned)", "new\nline", "-o", "é"]
)
def test_new_folder_under_any_name(tmp_path: Path, name: str) -> None:
    write_folder(tmp_path / name, FILES)
    assert tree(tmp_path / name) == FILES
    assert [p.name for p in tmp_path.iterdir()] == [name.split("/")[0]]


def test_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_folder(Path("build/demo"), FILES)
    write_folder(Path("build/demo"), FILES)
    assert tree(tmp_path / "build/demo") == FILES


def test_empty_folder_and_link_to_one(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    write_folder(tmp_path / "link", FILES)
    assert tree(tmp_path / "real") == FILES
    assert (tmp_path / "link").is_symlink()


def test_modes_follow_umask(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        write_folder(tmp_path / "out", FILES)
    finally:
        os.umask(old)
    modes = {
        name: (tmp_path / "out" / name).stat().st_mode & 0o777
        for name in ("plan.json", "launch.sh", "model")
    }
    assert modes == {"plan.json": 0o640, "launch.sh": 0o750, "model": 0o750}
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750


def test_own_output_is_replaced_and_the_run_is_kept(tmp_path: Path) -> None:
    write_folder(tmp_path, WITH_TOKENIZER)
    kept = {"run/metrics.jsonl": b"1", "checkpoints/step-00000001/x": b"2", "notes.txt": b"mine"}
    for name, content in kept.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "model/stale.json").write_bytes(b"old")

    write_folder(tmp_path, {**FILES, "plan.json": b"[]\n"})

    assert tree(tmp_path) == {**FILES, "plan.json": b"[]\n", **kept}
    assert not (tmp_path / "tokenizer").exists() and not (tmp_path / "launch").exists()


def test_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    assert refused(tmp_path / "out") == "SW5101"
    assert (tmp_path / "out").read_text() == "mine"
    assert refused(tmp_path / "out" / "below") == "SW5101"


def test_dangling_link(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to("nowhere")
    assert refused(tmp_path / "out") == "SW5101"
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("name", ["thesis.tex", "plan.json", ".hidden", "run/metrics.jsonl"])
def test_foreign_folder_is_untouched(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    assert refused(tmp_path) == "SW5102"
    assert tree(tmp_path) == {name: b"mine"}


def test_foreign_marker_does_not_count(tmp_path: Path) -> None:
    (tmp_path / MARKER).write_text("someone else's")
    assert refused(tmp_path) == "SW5102"


def test_link_inside_our_folder_is_not_followed(tmp_path: Path) -> None:
    write_folder(tmp_path / "out", FILES)
    elsewhere = tmp_path / "elsewhere"
    (tmp_path / "out/model").rename(elsewhere)
    (tmp_path / "out/model").symlink_to(elsewhere)
    (elsewhere / "precious").write_text("mine")
    assert refused(tmp_path / "out") == "SW5104"
    assert (elsewhere / "precious").read_text() == "mine"


@pytest.mark.parametrize("existing", [False, True])
def test_disk_error_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existing: bool
) -> None:
    out = tmp_path / "a" / "out"
    if existing:
        write_folder(out, FILES)
    before = tree(tmp_path)

    def full(self: Path, content: bytes) -> int:
        if self.name == "config.json":
            raise OSError(28, "No space left on device", str(self))
        return original(self, content)

    original = Path.write_bytes
    monkeypatch.setattr(Path, "write_bytes", full)
    assert refused(out, {**FILES, "plan.json": b"new"}) == "SW5103"
    assert tree(tmp_path) == before
    assert existing or list(tmp_path.iterdir()) == []


def test_cut_off_between_two_files_is_still_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    calls = []

    def replace_once(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == 2:
            raise OSError(5, "Input/output error")
        original(source, target)

    original = os.replace
    monkeypatch.setattr(os, "replace", replace_once)
    assert refused(tmp_path / "out") == "SW5103"
    monkeypatch.undo()
    write_folder(tmp_path / "out", FILES)
    assert tree(tmp_path / "out") == FILES


def test_unwritable_parent(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with bound_by_permissions():
            assert refused(tmp_path / "out") == "SW5103"
    finally:
        tmp_path.chmod(0o700)
    assert not list(tmp_path.iterdir())


def test_name_too_long(tmp_path: Path) -> None:
    assert refused(tmp_path / ("x" * 300)) == "SW5103"
    assert list(tmp_path.iterdir()) == []


def test_cut_off_leaves_no_plan_of_a_mixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever ends the process between two renames: `run` must not find the old plan among new
    files."""
    out = tmp_path / "out"
    write_folder(out, FILES)

    def replace_until_launch(source: Path, target: Path) -> None:
        if target.name == "launch.sh":
            raise KeyboardInterrupt
        original(source, target)

    original = os.replace
    monkeypatch.setattr(os, "replace", replace_until_launch)
    with pytest.raises(KeyboardInterrupt):
        write_folder(out, {**FILES, "model/config.json": b"new", "plan.json": b"new"})
    assert not (out / "plan.json").exists()
    assert not [path for path in out.iterdir() if path.name.startswith(".shardwright-")]
    monkeypatch.undo()
    write_folder(out, FILES)
    assert tree(out) == FILES

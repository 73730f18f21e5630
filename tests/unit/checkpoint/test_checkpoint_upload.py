"""Copies of checkpoints at a URL: whole or not there, and back again."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import fsspec
import pytest

from shardwright.checkpoint.checkpoint_manifest import (
    CHECKSUMS,
    checksum,
    checksums_text,
    damage,
    read_checksums,
)
from shardwright.checkpoint.checkpoint_storage import CheckpointStore
from shardwright.checkpoint.resume_checkpoint import choose_checkpoint
from shardwright.checkpoint.run_history import RunHistory
from shardwright.cli import main as cli
from shardwright.diagnostics import Refusal
from shardwright.plan.plan import plan_to_json, read_plan
from shardwright.train.run_attempt import Attempt, begin_attempt
from tests.conftest import SMALL_RECIPE
from tests.unit.checkpoint.written_checkpoints import write_checkpoint


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"


def sent(store: CheckpointStore, step: Path) -> None:
    store.put(step, [*read_checksums(step), CHECKSUMS])


def test_a_copy_counts_once_its_checksums_are_there(tmp_path: Path, url: str) -> None:
    store, step = CheckpointStore(url), write_checkpoint(tmp_path)
    store.check()
    assert store.steps() == []
    store.put(step, read_checksums(step))
    assert store.steps() == []
    store.put(step, [CHECKSUMS])
    assert store.steps() == ["step-00000004"]
    store.remove("step-00000004")
    assert store.steps() == []


def test_whether_a_copy_was_written_after_a_finite_loss(tmp_path: Path, url: str) -> None:
    store = CheckpointStore(url)
    for step, finite in ((4, True), (8, False)):
        sent(store, write_checkpoint(tmp_path, step=step, finite=finite))
    assert [store.is_finite(name) for name in store.steps()] == [True, False]


def test_what_is_missing_or_damaged_comes_back(tmp_path: Path, url: str) -> None:
    store, step = CheckpointStore(url), write_checkpoint(tmp_path, ranks=2)
    sent(store, step)
    (step / "rank-00000-000.safetensors").unlink()
    (step / "rank-00001-000.safetensors").write_bytes(b"x")
    store.fetch(step.name, step.parent)
    assert damage(step, contents=True) is None
    fetched = store.fetch(step.name, tmp_path / "elsewhere")
    assert damage(fetched, contents=True) is None


def test_a_copy_that_arrived_otherwise_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, step = CheckpointStore("memory://bucket/run"), write_checkpoint(tmp_path)
    memory = fsspec.filesystem("memory")

    def half(local: str, there: str, **_: object) -> None:
        memory.pipe_file(there, Path(local).read_bytes()[:-1])

    monkeypatch.setattr(memory, "put_file", half)
    with pytest.raises(Refusal, match="differs from what was uploaded") as refused:
        sent(store, step)
    assert refused.value.diagnostics[0].code == "SW6208"
    assert store.steps() == []


@pytest.mark.parametrize(
    ("bad", "why"), [("nosuch://x/y", "nosuch"), ("file:///proc/nowhere/x", "cannot be written")]
)
def test_a_store_that_is_none(bad: str, why: str) -> None:
    with pytest.raises(Refusal, match=why) as refused:
        CheckpointStore(bad).check()
    assert refused.value.diagnostics[0].code == "SW6208"


def test_a_lost_or_damaged_checkpoint_is_fetched_on_resume(tmp_path: Path, url: str) -> None:
    recipe = SMALL_RECIPE | {"checkpoint": {"upload_to": url, "keep": 2}}
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    out = tmp_path / "out"
    assert cli.main(["compile", str(tmp_path / "recipe.json"), "-o", str(out)]) == 0
    plan = read_plan(out)
    assert plan.checkpoint.upload_to == url
    for step in (4, 8):
        sent(CheckpointStore(url), write_checkpoint(out, step=step))
    root = out / "checkpoints"
    (root / "step-00000008").rename(tmp_path / "lost")
    found = choose_checkpoint(plan, out, "auto")
    assert found is not None and found.path.name == "step-00000008" and found.notes == ()
    data = root / "step-00000008" / "rank-00000-000.safetensors"
    data.write_bytes(data.read_bytes()[:-1] + b"?")
    found = choose_checkpoint(plan, out, "auto")
    assert found is not None and found.path.name == "step-00000008" and found.notes == ()
    # Without the store it would have been skipped.
    alone = dataclasses.replace(
        plan, checkpoint=dataclasses.replace(plan.checkpoint, upload_to=None)
    )
    (out / "plan.json").write_text(plan_to_json(alone))
    data.write_bytes(b"")
    found = choose_checkpoint(alone, out, "auto")
    assert found is not None and found.path.name == "step-00000004" and len(found.notes) == 1


ESCAPES = (
    "../escaped",
    "model/../../escaped",
    "/tmp/escaped",
    "a\\..\\escaped",
    "model//escaped",
    "es\0caped",
    "..",
)


@pytest.mark.parametrize("name", ESCAPES)
def test_a_hostile_store_writes_nothing_outside(name: str, tmp_path: Path, url: str) -> None:
    """A name in SHA256SUMS that leads out of the folder is refused before any file of the copy is
    written."""
    store, step = CheckpointStore(url), write_checkpoint(tmp_path)
    sent(store, step)
    there = tmp_path / "store" / step.name
    (tmp_path / "store" / "escaped").write_text("theirs")
    with (there / CHECKSUMS).open("a") as file:
        file.write(f"{'0' * 64}  {name}\n")
    before = {path.relative_to(tmp_path) for path in tmp_path.rglob("*")}
    with pytest.raises(Refusal, match=r"is not a valid name of a file in a checkpoint") as refused:
        store.fetch(step.name, tmp_path / "here")
    assert refused.value.diagnostics[0].code == "SW6208"
    after = {path.relative_to(tmp_path) for path in tmp_path.rglob("*")}
    assert {str(path) for path in after - before} <= {"here", f"here/.{step.name}.fetched"}


def test_a_link_in_a_checkpoint_is_not_written_through(tmp_path: Path, url: str) -> None:
    store, step = CheckpointStore(url), write_checkpoint(tmp_path)
    (step / "model").mkdir()
    (step / "model" / "config.json").write_text("{}")
    sums = read_checksums(step) | {"model/config.json": checksum(step / "model" / "config.json")}
    (step / CHECKSUMS).write_text(checksums_text(sums))
    sent(store, step)
    outside = tmp_path / "outside"
    outside.mkdir()
    shutil.rmtree(step / "model")
    (step / "model").symlink_to(outside)
    with pytest.raises(Refusal, match="is a link out of the checkpoint"):
        store.fetch(step.name, step.parent)
    assert not list(outside.iterdir())


@pytest.fixture
def uploads(tmp_path: Path, url: str) -> Path:
    """A compiled folder that keeps two checkpoints and copies each to `url`."""
    recipe = SMALL_RECIPE | {"checkpoint": {"upload_to": url, "keep": 2}}
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    assert cli.main(["compile", str(tmp_path / "recipe.json"), "-o", str(tmp_path / "out")]) == 0
    return tmp_path / "out"


def begun(out: Path, resume: str) -> Attempt:
    plan = read_plan(out)
    return begin_attempt(plan, out, choose_checkpoint(plan, out, resume), fresh=resume == "never")


def saved(out: Path, store: CheckpointStore, line: RunHistory, *steps: int) -> None:
    """As a run of this line leaves them, here and there."""
    for step in steps:
        path = write_checkpoint(out, step=step, line=line)
        store.invalidate_copy(path.name, line)
        sent(store, path)
        store.set_current(line)
        store.prune(line, 2)


def test_a_new_run_and_an_abandoned_one_share_a_store(
    uploads: Path, url: str, tmp_path: Path
) -> None:
    """Neither prunes the other's copies, and what is resumed is never the abandoned run, however
    far it was."""
    store, out = CheckpointStore(url), uploads
    old = begun(out, "auto").line
    saved(out, store, old, 4, 8, 12, 16)
    assert store.steps() == ["step-00000012", "step-00000016"]
    new = begun(out, "never").line
    assert choose_checkpoint(read_plan(out), out, "auto") is None, "it has written nothing yet"
    saved(out, store, new, 4, 8, 12)
    assert store.steps() == ["step-00000008", "step-00000012", "step-00000016"]
    assert [store.run_history_of(name).run for name in store.steps()] == [new.run, new.run, old.run]
    aside = tmp_path / "store" / f".before-{new.run}" / "step-00000012"
    assert damage(aside, contents=True) is None, (
        "the new run's step 12 takes the name of the old one's"
    )
    shutil.rmtree(out / "checkpoints")
    found = choose_checkpoint(read_plan(out), out, "auto")
    assert found is not None and (found.step, found.line) == (12, new)
    # A folder that knows of no run yet goes on with the one that was copied there last.
    shutil.rmtree(out / "checkpoints")
    shutil.rmtree(out / "run")
    found = choose_checkpoint(read_plan(out), out, "auto")
    assert found is not None and (found.step, found.line) == (12, new)


def test_going_on_from_an_older_step_abandons_the_later_copies(uploads: Path, url: str) -> None:
    store, out = CheckpointStore(url), uploads
    saved(out, store, begun(out, "auto").line, 4, 8)
    line = begun(out, str(out / "checkpoints" / "step-00000004")).line
    shutil.rmtree(out / "checkpoints")
    found = choose_checkpoint(read_plan(out), out, "auto")
    assert found is not None and (found.step, found.line) == (4, line)
    saved(out, store, line, 6)
    assert store.steps() == ["step-00000004", "step-00000006", "step-00000008"]
    assert choose_checkpoint(read_plan(out), out, "auto").step == 6  # type: ignore[union-attr]


def test_a_copy_that_cannot_be_fetched_is_skipped(uploads: Path, url: str, tmp_path: Path) -> None:
    store, out = CheckpointStore(url), uploads
    saved(out, store, begun(out, "auto").line, 4, 8)
    shutil.rmtree(out / "checkpoints")
    (tmp_path / "store" / "step-00000008" / "rank-00000-000.safetensors").unlink()
    found = choose_checkpoint(read_plan(out), out, "auto")
    assert found is not None and found.step == 4
    assert found.notes[0].startswith(
        "warning[SW6206]: step-00000008 is skipped: checkpoint.upload_to"
    )


def test_what_an_upload_left_unfinished_goes_with_the_older_ones(
    uploads: Path, url: str, tmp_path: Path
) -> None:
    store, out = CheckpointStore(url), uploads
    line = begun(out, "auto").line
    cut_off = write_checkpoint(out, step=2, line=line)
    store.invalidate_copy(cut_off.name, line)
    store.put(cut_off, ["run.json", "rank-00000-000.safetensors"])
    saved(out, store, line, 4)
    assert sorted(p.name for p in (tmp_path / "store").iterdir()) == [".run.json", "step-00000004"]


def test_a_last_copy_that_failed_is_made_by_the_next_run(
    uploads: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else nobody would: there is no step left to train."""
    out, store = uploads, CheckpointStore(url)
    write_checkpoint(out, step=read_plan(out).training.steps, line=begun(out, "auto").line)
    for told in (True, False):
        assert cli.main(["run", str(out)]) == 0
        said = capsys.readouterr().out
        assert "already trained" in said and ("copied       step-00000010" in said) is told
    assert store.steps() == ["step-00000010"]
    assert damage(store.fetch("step-00000010", out / "fetched"), contents=True) is None


def test_a_url_is_needed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recipe.json").write_text(
        json.dumps(SMALL_RECIPE | {"checkpoint": {"upload_to": "/mnt/copies"}})
    )
    assert cli.main(["check", str(tmp_path / "recipe.json")]) == 1
    assert "upload_to" in capsys.readouterr().err

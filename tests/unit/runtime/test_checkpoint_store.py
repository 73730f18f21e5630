"""Copies of checkpoints at a URL: whole or not there, and back again."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import fsspec
import pytest

from shardwright.cli import main as cli
from shardwright.diagnostics import Refusal
from shardwright.plan.serialize import plan_to_json, read_plan
from shardwright.runtime.checkpoint_index import choose_checkpoint
from shardwright.runtime.checkpoint_manifest import CHECKSUMS, damage, read_checksums
from shardwright.runtime.checkpoint_store import CheckpointStore
from tests.conftest import SMALL_RECIPE
from tests.unit.runtime.saved import write_checkpoint


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


def test_what_is_missing_or_damaged_comes_back(tmp_path: Path, url: str) -> None:
    store, step = CheckpointStore(url), write_checkpoint(tmp_path, ranks=2)
    sent(store, step)
    (step / "rank-00000-000.safetensors").unlink()
    (step / "rank-00001-000.safetensors").write_bytes(b"x")
    store.fetch(step.name, step.parent)
    assert damage(step, contents=True) is None
    fetched = store.fetch(step.name, tmp_path / "elsewhere")
    assert damage(fetched, contents=True) is None


def test_a_copy_that_arrived_otherwise_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, step = CheckpointStore("memory://bucket/run"), write_checkpoint(tmp_path)
    memory = fsspec.filesystem("memory")

    def half(local: str, there: str, **_: object) -> None:
        memory.pipe_file(there, Path(local).read_bytes()[:-1])

    monkeypatch.setattr(memory, "put_file", half)
    with pytest.raises(Refusal, match="is not there as it was sent") as refused:
        sent(store, step)
    assert refused.value.diagnostics[0].code == "SW6208"
    assert store.steps() == []


@pytest.mark.parametrize(("bad", "why"), [("nosuch://x/y", "nosuch"), ("file:///proc/nowhere/x", "cannot be written")])
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
    alone = dataclasses.replace(plan, checkpoint=dataclasses.replace(plan.checkpoint, upload_to=None))
    (out / "plan.json").write_text(plan_to_json(alone))
    data.write_bytes(b"")
    found = choose_checkpoint(alone, out, "auto")
    assert found is not None and found.path.name == "step-00000004" and len(found.notes) == 1


def test_a_url_is_needed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recipe.json").write_text(json.dumps(SMALL_RECIPE | {"checkpoint": {"upload_to": "/mnt/copies"}}))
    assert cli.main(["check", str(tmp_path / "recipe.json")]) == 1
    assert "upload_to" in capsys.readouterr().err

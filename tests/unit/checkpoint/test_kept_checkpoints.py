"""`checkpoint.keep`: the newest stay, here and in upload_to; what others wrote stays too."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwright.checkpoint import checkpoint_saver as checkpoint
from shardwright.checkpoint.checkpoint_storage import CheckpointStore
from shardwright.checkpoint.run_history import RunHistory
from tests.unit.checkpoint.written_checkpoints import write_checkpoint

OURS, THEIRS = RunHistory(run="ours"), RunHistory(run="theirs")


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.barrier", lambda: None)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


@pytest.mark.parametrize(
    ("keep", "left"), [(1, [12]), (2, [8, 12]), (3, [4, 8, 12]), (9, [2, 4, 8, 12])]
)
def test_the_newest_stay(keep: int, left: list[int], tmp_path: Path) -> None:
    """Here, and the copies."""
    store = CheckpointStore(f"file://{tmp_path / 'store'}")
    for step in (
        8,
        2,
        12,
        4,
    ):  # written in no order: a resumed run's file times need not follow the steps
        path = write_checkpoint(tmp_path, step=step, line=OURS)
        store.put(path, [str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()])
    checkpoint._prune(tmp_path / "checkpoints", store, keep, OURS, 12, (True, False))
    assert names(tmp_path / "checkpoints") == [f"step-{step:08d}" for step in left]
    assert store.steps() == [f"step-{step:08d}" for step in left]


def test_of_another_run_nothing_is_pruned(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write_checkpoint(tmp_path, step=step, line=THEIRS)
    for step in (4, 5):
        write_checkpoint(tmp_path, step=step, line=OURS)
    checkpoint._prune(tmp_path / "checkpoints", None, 1, OURS, 5, (True, False))
    assert names(tmp_path / "checkpoints") == [f"step-{step:08d}" for step in (1, 2, 3, 5)]


def test_a_rank_that_leads_nothing_prunes_nothing(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write_checkpoint(tmp_path, step=step, line=OURS)
    checkpoint._prune(tmp_path / "checkpoints", None, 1, OURS, 3, (False, False))
    assert len(names(tmp_path / "checkpoints")) == 3

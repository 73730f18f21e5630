"""A teacher's file: checked once a host by its headers before the first step, and read sequence by
sequence."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch import distributed

from shardwright.data import score_files
from shardwright.data.dataset import Dataset
from shardwright.data.score_files import TRAIN
from shardwright.data.sequences import ArraySequences, EpochSampler
from shardwright.diagnostics import Refusal
from shardwright.train import teacher_scores
from shardwright.train.teacher_scores import with_teacher
from tests.unit.data.test_score_files import DIGESTS, LENGTH, OF_A_BLOCK, SEQUENCES, TOP, written


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(teacher_scores, "teacher_digests", lambda *_: DIGESTS)
    monkeypatch.setattr(teacher_scores, "SECONDS_BETWEEN_LINES", -1.0)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def taught(folder: Path) -> Dataset:
    plan: Any = SimpleNamespace(
        training=SimpleNamespace(objective=SimpleNamespace(teacher=str(folder)))
    )
    ids = np.zeros((SEQUENCES, LENGTH), dtype=np.int32)
    order = EpochSampler(SEQUENCES, 1, 1, shuffle=False)
    data = Dataset(train=ArraySequences(ids), order=order, parts=(), validation=None, steps=1)
    return with_teacher(plan, folder, data)


def test_no_block_is_read_whole_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    is_label, values = written(tmp_path, TOP)
    monkeypatch.setattr(score_files, "read_block", None)
    data = taught(tmp_path)
    assert "teacher: 2 of 2 blocks checked" in capsys.readouterr().out
    found = data.train.read(np.arange(SEQUENCES)).teacher
    assert found is not None
    wanted = np.where(is_label[..., None], values[..., 2 : 2 + TOP], 0)
    assert np.array_equal(found[0], wanted)


def test_a_missing_block_ends_the_run_before_the_first_step(tmp_path: Path) -> None:
    written(tmp_path, TOP)
    (tmp_path / f"{TRAIN}-{OF_A_BLOCK:05d}.safetensors").unlink()
    with pytest.raises(Refusal, match=f"SW6270: host {socket.gethostname()}.*train-00004"):
        taught(tmp_path)

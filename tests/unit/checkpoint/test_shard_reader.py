"""A shard of any layout out of a checkpoint of any other."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from shardwright.checkpoint.checkpoint_loader import CheckpointReader, cut
from shardwright.diagnostics import Refusal
from shardwright.layout.parameter_sharding import ParameterSharding
from tests.unit.checkpoint.written_checkpoints import WHOLE, write_checkpoint


def split(
    dimension: int, blocks: tuple[int, ...], sizes: tuple[int, ...], copies: int = 1
) -> ParameterSharding:
    return ParameterSharding(
        name="w", shape=(6, 4), dimension=dimension, blocks=blocks, sizes=sizes, copies=copies
    )


SPLITS = {
    "whole": WHOLE,
    "rows": split(0, (6,), (3, 3)),
    "uneven rows": split(0, (6,), (2, 2, 1, 1)),
    "fused rows": split(0, (2, 4), (3, 3)),
    "columns": split(1, (4,), (2, 2)),
    "copied rows": split(0, (6,), (3, 3, 3, 3), copies=2),
}


@pytest.mark.parametrize(("writer", "reader"), list(itertools.product(SPLITS, SPLITS)))
def test_every_cut_reads_every_other(writer: str, reader: str, tmp_path: Path) -> None:
    whole = torch.randn(6, 4)
    path = write_checkpoint(tmp_path, split=SPLITS[writer], whole=whole, ranks=3)
    wanted = SPLITS[reader]
    with CheckpointReader(path) as checkpoint:
        assert torch.equal(checkpoint.whole("w", "fp32"), whole)
        for rank in range(max(1, len(wanted.sizes))):
            shard = cut(wanted, whole + 2, rank).reshape(-1)
            for start, numel in ((0, shard.numel()), (1, 3), (shard.numel() - 2, 2)):
                got = checkpoint.fragment("w", "exp_avg_sq", wanted, rank, start, numel)
                assert torch.equal(got, shard[start : start + numel])


@pytest.mark.parametrize(("writer", "reader"), list(itertools.product((1, 2, 3, 6), repeat=2)))
@pytest.mark.parametrize(
    ("saved", "wanted"), list(itertools.product(("whole", "columns"), repeat=2))
)
def test_every_part_of_the_experts_reads_every_other(
    writer: int,
    reader: int,
    saved: str,
    wanted: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Six experts of four elements; a rank's own, and no others are read."""
    whole, split = torch.randn(6, 4), SPLITS[wanted]
    path = write_checkpoint(tmp_path, split=SPLITS[saved], whole=whole, ranks=3, experts=writer)
    with CheckpointReader(path) as checkpoint:
        assert torch.equal(checkpoint.whole("w", "fp32"), whole)
        read = _count_elements(checkpoint, monkeypatch)
        for part, rank in itertools.product(range(reader), range(max(1, len(split.sizes)))):
            shard = cut(split, whole.chunk(reader)[part] + 1, rank).reshape(-1)
            read.clear()
            got = checkpoint.fragment(
                "w", "exp_avg", split, rank, 1, shard.numel() - 1, (part, reader)
            )
            assert torch.equal(got, shard[1:])
            assert reader == 1 or sum(read) <= 24 // reader


def _count_elements(checkpoint: CheckpointReader, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    read: list[int] = []
    plain = checkpoint._read

    def counted(number: int, key: str, first: int, last: int) -> torch.Tensor:
        read.append(last - first)
        return plain(number, key, first, last)

    monkeypatch.setattr(checkpoint, "_read", counted)
    return read


def test_elements_that_are_not_there_are_not_made_up(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path)
    with CheckpointReader(path) as checkpoint:
        with pytest.raises(Refusal, match="elements 24 to 25 of"):
            checkpoint.fragment("w", "fp32", WHOLE, 0, 20, 5)
        with pytest.raises(Refusal, match="has no parameter v"):
            checkpoint.whole("v", "fp32")
        other = ParameterSharding(name="w", shape=(6, 5), dimension=None, blocks=(), sizes=())
        with pytest.raises(Refusal, match="shape"):
            checkpoint.fragment("w", "fp32", other, 0, 0, 30)

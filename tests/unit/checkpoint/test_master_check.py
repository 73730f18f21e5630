"""What the check of masters takes for the same weight, by itself; on engines:
tests/parity/test_masters.py."""

from __future__ import annotations

import math

import pytest
import torch

from shardwright.checkpoint import checkpoint_saver
from shardwright.checkpoint.checkpoint_saver import check_master_weights
from shardwright.diagnostics import Refusal
from shardwright.engines.trainer_protocol import OwnedShard

HALVES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_saver, "CHUNK_ELEMENTS", 7)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 1)

    def gather(everyone: list[object], mine: object) -> None:
        everyone[0] = mine

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)


def fragment(master: torch.Tensor, live: torch.Tensor) -> OwnedShard:
    states = {"fp32": master}
    return OwnedShard(
        name="w", shard_shape=tuple(live.shape), start=0, states=states, live=live, partitioned=True
    )


def weights(dtype: torch.dtype, *last: float) -> OwnedShard:
    master = torch.cat(
        [torch.randn(20, generator=torch.Generator().manual_seed(1)), torch.tensor(last)]
    )
    return fragment(master, master.to(dtype, copy=True))


@pytest.mark.parametrize("dtype", HALVES)
def test_the_same(dtype: torch.dtype) -> None:
    assert check_master_weights([weights(dtype), weights(dtype, 0.0, -0.0)])
    empty = torch.zeros(0)
    assert check_master_weights([fragment(empty, empty.to(dtype))])


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_numbers_are_the_same_too_and_are_told(dtype: torch.dtype, value: float) -> None:
    assert check_master_weights([weights(dtype), weights(dtype, value, 1.0)]) is False


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("there", "here"), [(1.0, 2.0), (1.0, math.nan), (math.nan, 1.0), (1.0, math.inf)]
)
def test_one_element_of_the_last_piece(dtype: torch.dtype, there: float, here: float) -> None:
    f = weights(dtype, there)
    f.live[-1] = here
    with pytest.raises(Refusal, match=r"copy of w differs .* in 1 of 21 elements") as refusal:
        check_master_weights([weights(dtype), f])
    assert refusal.value.diagnostics[0].code == "SW6210"


def test_two_zeros_and_two_forms_of_nan_are_the_same_number() -> None:
    f = weights(torch.bfloat16, 0.0, math.nan)
    f.live[-2] = -0.0
    f.live.view(torch.int16)[-1] -= 1  # another payload
    assert f.live[-1].isnan() and check_master_weights([f]) is False

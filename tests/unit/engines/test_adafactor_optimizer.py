"""Adafactor over parts of weights updates them as torch's does over whole weights.

A thread stands for a rank.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

pytest.importorskip("deepspeed")

from shardwright.engines.deepspeed.adafactor_optimizer import (
    FactoredWeight,
    ShardedAdafactor,
)
from shardwright.engines.deepspeed.weight_shards import WeightShard

RATE, DECAY = 1e-2, 0.1
Ranges = tuple[tuple[int, int], ...]
Part = tuple[Ranges, int, int]
"""Ranges along the dimension that tensor ranks shard; begin and end in the flattened shard."""
SHAPE = (24, 20)
CASES: dict[str, tuple[tuple[int, ...], int | None, list[Part]]] = {
    "two data ranks": (SHAPE, None, [((), 0, 233), ((), 233, 480)]),
    "no share": (SHAPE, None, [((), 0, 480), ((), 480, 480)]),
    "copies": (SHAPE, None, [((), 0, 480), ((), 0, 480)]),
    "rows": (SHAPE, 0, [(((0, 14),), 0, 280), (((14, 10),), 0, 7), (((14, 10),), 7, 200)]),
    "fused rows": (SHAPE, 0, [(((0, 6), (12, 6)), 0, 240), (((6, 6), (18, 6)), 0, 240)]),
    "columns": (SHAPE, 1, [(((0, 10),), 0, 100), (((0, 10),), 100, 240), (((10, 10),), 0, 240)]),
    "experts": ((4, 6, 20), None, [((), 0, 131), ((), 131, 480)]),
    "columns of experts": ((4, 6, 20), 2, [(((0, 10),), 0, 240), (((10, 10),), 0, 240)]),
    "rows of experts": (
        (4, 6, 20),
        1,
        [(((0, 3),), 0, 77), (((0, 3),), 77, 240), (((3, 3),), 0, 240)],
    ),
    "vector": ((480,), None, [((), 0, 100), ((), 100, 480)]),
}


class Ranks:
    """Sum tensors over threads."""

    def __init__(self, count: int) -> None:
        self.ranks = list(range(count))
        self._barrier = threading.Barrier(count)
        self._given: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def sum(self, values: torch.Tensor) -> None:
        with self._lock:
            self._given.append(values.clone())
        self._barrier.wait()
        values.copy_(torch.stack(self._given).sum(0))
        if self._barrier.wait() == 0:
            self._given.clear()
        self._barrier.wait()


def optimizer_of(
    shape: tuple[int, ...], dimension: int | None, part: Part, ranks: Ranks, copies: int, start: Any
) -> tuple[ShardedAdafactor, torch.nn.Parameter, WeightShard]:
    ranges, begin, end = part
    shard = WeightShard("w", shape, dimension, ranges, 3, begin, end - begin)
    master = torch.nn.Parameter(torch.zeros(end - begin + 5))
    shard.own(master.data).copy_(shard.take(start.reshape(-1)))
    keys = SimpleNamespace(
        lr=RATE,
        eps=1e-7,
        beta2_decay=-0.8,
        clip_threshold=1.0,
        scale_parameter=True,
        scale_eps=1e-3,
    )
    groups = [{"params": [master], "weight_decay": DECAY}]
    optimizer = ShardedAdafactor(cast(Any, SimpleNamespace(optimizer=keys)), groups)
    weight = FactoredWeight(shard, False, copies, copies, shard.full_numel)
    if weight.is_factored:
        weight.states["row_var"] = torch.zeros(*shape[:-1], 1)
        weight.states["col_var"] = torch.zeros(*shape[:-2], 1, shape[-1])
    else:
        weight.states["variance"] = torch.zeros(shard.numel)
    optimizer.weights["w"] = weight
    optimizer._held = {master: [weight]}
    optimizer._sharing = {False: cast(Any, ranks)}
    return optimizer, master, shard


@pytest.mark.parametrize("name", CASES)
def test_parts_of_a_weight_are_updated_as_the_whole(name: str) -> None:
    shape, dimension, parts = CASES[name]
    torch.manual_seed(7)
    start = torch.randn(shape)
    whole = torch.nn.Parameter(start.clone())
    wanted = torch.optim.Adafactor([whole], lr=RATE, eps=(1e-7, 1e-3), weight_decay=DECAY)
    ranks = Ranks(len(parts))
    held = sum(end - begin for _, begin, end in parts)
    copies, rest = divmod(held, start.numel())
    assert not rest
    built = [optimizer_of(shape, dimension, part, ranks, copies, start) for part in parts]
    for _ in range(3):
        gradient = torch.randn(shape) * torch.rand(shape) ** 3
        whole.grad = gradient.clone()
        wanted.step()
        for _, master, shard in built:
            master.grad = torch.zeros_like(master)
            shard.own(master.grad).copy_(shard.take(gradient.reshape(-1)))
        with ThreadPoolExecutor(len(built)) as pool:
            list(pool.map(lambda each: each[0].step(), built))
        for optimizer, master, shard in built:
            own = shard.own(master.detach())
            assert torch.allclose(own, shard.take(whole.detach().reshape(-1)), atol=1e-6)
            assert (master.detach()[:3] == 0).all() and (master.detach()[-2:] == 0).all()
            for state, values in optimizer.weights["w"].states.items():
                saved = wanted.state[whole][state]
                saved = shard.take(saved) if state == "variance" else saved
                assert torch.allclose(values, saved, rtol=1e-5, atol=1e-9)

"""8-bit AdamW over parts of weights updates them as torchao's does over whole weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

pytest.importorskip("deepspeed")
torchao_optim = pytest.importorskip("torchao.optim")

from deepspeed import comm as dist  # noqa: E402

from shardwright.engines.deepspeed import adamw_8bit_optimizer  # noqa: E402
from shardwright.engines.deepspeed.adamw_8bit_optimizer import (  # noqa: E402
    MOMENTS,
    EightBitWeight,
    ShardedAdamW8bit,
)
from shardwright.engines.deepspeed.weight_shards import SharingRanks, WeightShard  # noqa: E402

SHAPE, BETAS, EPS, RATE, DECAY = (72, 128), (0.9, 0.95), 1e-3, 1e-2, 0.1
PARTS = [(0, 1000), (1000, 1010), (1010, 1100), (1100, 72 * 128)]
"""Three ranks share block 3, two share block 4."""
GROUP: Any = None


def rank_of(start: int, stop: int, weight: torch.Tensor) -> tuple[ShardedAdamW8bit, torch.Tensor]:
    master = torch.nn.Parameter(weight.reshape(-1)[start:stop].clone())
    keys = SimpleNamespace(optimizer=SimpleNamespace(lr=RATE, betas=BETAS, eps=EPS))
    groups = [{"params": [master], "weight_decay": DECAY}]
    optimizer = ShardedAdamW8bit(cast(Any, keys), groups)
    shard = WeightShard("w", SHAPE, None, (), 0, start, stop - start)
    cut = tuple(sorted({at // 256 for part in PARTS for at in part if at % 256}))
    held = EightBitWeight(shard=shard, is_expert=False, is_quantized=True, cut=cut)
    for moment in MOMENTS:
        held.states[moment] = torch.zeros(stop - start, dtype=torch.uint8)
        held.states[f"{moment}_scale"] = torch.zeros(held.block_count)
    optimizer.weights["w"] = held
    optimizer._held = {master: [held]}
    optimizer._sharing = {False: SharingRanks(GROUP, [0, 1, 2, 3])}
    return optimizer, master


@pytest.mark.parametrize("chunk", [1, 3, 2**16])
def test_parts_of_a_weight_are_updated_as_the_whole(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adamw_8bit_optimizer, "CHUNK_BLOCKS", chunk)
    torch.manual_seed(5)
    start = torch.randn(SHAPE)
    whole = torch.nn.Parameter(start.clone())
    wanted = torchao_optim.AdamW8bit([whole], lr=RATE, betas=BETAS, eps=EPS, weight_decay=DECAY)
    ranks = [rank_of(first, last, start) for first, last in PARTS]
    for _ in range(3):
        gradient = torch.randn(SHAPE) * torch.rand(SHAPE) ** 3
        whole.grad = gradient
        with torch.compiler.set_stance("force_eager"):
            wanted.step()
        for (first, last), (_, master) in zip(PARTS, ranks, strict=True):
            master.grad = gradient.reshape(-1)[first:last].clone()
        found: list[torch.Tensor] = []
        monkeypatch.setattr(
            dist,
            "all_reduce",
            lambda t, found=found, **_: found.append(t.clone()),
        )
        for optimizer, master in ranks:
            optimizer._largest_of_cut_blocks([(master, optimizer.weights["w"])])
        shared = torch.stack(found).amax(0)
        monkeypatch.setattr(dist, "all_reduce", lambda t, shared=shared, **_: t.copy_(shared))
        for optimizer, _ in ranks:
            for group in optimizer.param_groups:
                group["lr"] = RATE
            optimizer.step()
        got = torch.cat([master.detach() for _, master in ranks]).view(SHAPE)
        assert (got - whole).abs().max() < 1e-6
        for moment in MOMENTS:
            codes = torch.cat([o.weights["w"].states[moment] for o, _ in ranks])
            assert torch.equal(codes, wanted.state[whole][moment].codes.view(-1))
            for optimizer, _ in ranks:
                held = optimizer.weights["w"]
                own = slice(held.first_block, held.first_block + held.block_count)
                scales = wanted.state[whole][moment].scale[own]
                assert torch.allclose(held.states[f"{moment}_scale"], scales, rtol=1e-6)

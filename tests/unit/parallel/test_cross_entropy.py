"""The vocabulary-parallel cross-entropy over two and three ranks, beside torch's own over the whole
vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch import multiprocessing

from shardwright.layout.parameter_sharding import shard_sizes
from shardwright.parallel.distributed_losses import CausalLoss
from shardwright.parallel.tensor_parallel_collectives import vocabulary_parallel_cross_entropy
from shardwright.utils.numeric_difference import max_abs_diff

IGNORE_INDEX, VOCABULARY, SHAPE = -100, 64, (3, 7)
SIZES = {f"{n} ranks": list(shard_sizes(VOCABULARY, n)) for n in (2, 3)} | {"uneven": [1, 50, 13]}


def whole(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """logits (far from zero, so that their exponentials would overflow), targets (every third
    ignored), a gradient."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(*SHAPE, VOCABULARY, generator=generator) * 4 + 200).to(dtype)
    target = torch.randint(0, VOCABULARY, SHAPE, generator=generator)
    target.view(-1)[::3] = IGNORE_INDEX
    return logits, target, torch.randn(SHAPE, generator=generator)


def worker(rank: int, folder: str) -> None:
    """Writes the largest deviations of this rank: case -> [losses, their gradient, the sum that
    CausalLoss makes]."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=3)
    groups = {n: dist.new_group(list(range(n))) for n in (2, 3)}
    apart = {}
    for name, sizes in SIZES.items():
        for dtype in (torch.float32, torch.bfloat16):
            if rank >= len(sizes):
                continue
            logits, target, gradient = whole(dtype)
            first, group = sum(sizes[:rank]), groups[len(sizes)]
            exact = logits.double().requires_grad_()
            wanted = F.cross_entropy(exact.flatten(0, 1), target.flatten(), reduction="none").view(
                SHAPE
            )
            (slope,) = torch.autograd.grad((wanted * gradient).sum(), exact)
            own = logits.narrow(-1, first, sizes[rank]).clone().requires_grad_()
            losses = vocabulary_parallel_cross_entropy(
                own, target, first=first, ignored=IGNORE_INDEX, group=group
            )
            (own_slope,) = torch.autograd.grad((losses * gradient).sum(), own)
            assert losses.dtype == torch.float32 and own_slope.dtype == dtype
            total = CausalLoss(group, first)(own, target)
            shifted = F.cross_entropy(
                logits.double()[:, :-1].flatten(0, 1),
                target[:, 1:].flatten(),
                reduction="sum",
                ignore_index=IGNORE_INDEX,
            )
            apart[f"{name} {dtype}"] = [
                max_abs_diff(losses.double(), wanted),
                max_abs_diff(own_slope, slope.narrow(-1, first, sizes[rank]).to(dtype)),
                abs(float(total.detach()) / float(shifted) - 1),
            ]
    Path(folder, f"{rank}.json").write_text(json.dumps(apart))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def deviations(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[float]]]:
    folder = tmp_path_factory.mktemp("ranks")
    multiprocessing.start_processes(worker, (str(folder),), nprocs=3, start_method="fork")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SIZES)
def test_as_torch_over_the_whole_vocabulary(
    name: str, dtype: torch.dtype, deviations: list[dict[str, list[float]]]
) -> None:
    """Computed from the same half-precision logits; of their gradient the last bit may differ."""
    for rank in range(len(SIZES[name])):
        losses, gradient, total = deviations[rank][f"{name} {dtype}"]
        assert losses < 1e-6
        assert gradient < (1e-6 if dtype == torch.float32 else 1e-2)
        assert total < 1e-6

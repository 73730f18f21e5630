"""Whose random numbers a tensor rank draws, and when it draws none."""

from __future__ import annotations

import torch

from shardwright.parallel.tensor_parallel_collectives import TensorParallelRng


def test_an_evaluation_draws_nothing() -> None:
    """The steps behind it draw the numbers that they would have drawn without it."""
    random = TensorParallelRng()
    random.use(1)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with torch.no_grad():
        random.enter()
        random.leave()
    assert torch.equal(torch.get_rng_state(), before)


def test_tensor_ranks_draw_apart_inside_a_cut_region_and_alike_behind_it() -> None:
    drawn = []
    for rank in range(2):
        random = TensorParallelRng()
        random.use(rank)
        torch.manual_seed(5)
        random.enter()
        inside = torch.rand(3)
        random.leave()
        drawn.append((inside, torch.rand(3)))
    assert not torch.equal(drawn[0][0], drawn[1][0]) and torch.equal(drawn[0][1], drawn[1][1])

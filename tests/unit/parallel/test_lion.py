"""Lion's update, by hand."""

from __future__ import annotations

import torch

from shardwright.engines.reference.reference_optimizer import (
    ReferenceOptimizer,
    optimizer_builder,
)
from shardwright.layout.optimizers import OPTIMIZERS
from shardwright.parallel import lion
from shardwright.parallel.lion import Lion
from shardwright.recipe.recipe_types import OptimizerSection


def test_two_updates_by_hand() -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    optimizer = Lion([{"params": [weight], "weight_decay": 0.5}], lr=0.1, betas=(0.75, 0.5))
    weight.grad = torch.tensor([4.0, -4.0, 0.0])
    optimizer.step()
    # The momentum is 0: the sign is the gradient's, that of 0 is 0. Each weight decays by 5%.
    assert torch.allclose(weight.detach(), torch.tensor([0.85, -1.8, 2.85]))
    assert torch.equal(optimizer.state[weight]["exp_avg"], torch.tensor([2.0, -2.0, 0.0]))
    weight.grad = torch.tensor([-4.0, 8.0, 1.0])
    optimizer.step()
    # 0.75 m + 0.25 g is 0.5, 0.5 and 0.25: the second turned.
    assert torch.allclose(weight.detach(), torch.tensor([0.7075, -1.81, 2.6075]))
    assert torch.equal(optimizer.state[weight]["exp_avg"], torch.tensor([-1.0, 3.0, 0.5]))
    assert optimizer.state[weight]["step"] == 2


def test_chunks_change_nothing() -> None:
    torch.manual_seed(1)
    start, gradient = torch.randn(7, 9), torch.randn(9, 7).t()
    found = []
    for size in (lion._CHUNK_ELEMENTS, 10):
        lion._CHUNK_ELEMENTS, kept = size, lion._CHUNK_ELEMENTS
        weight = torch.nn.Parameter(start.clone())
        optimizer = Lion([{"params": [weight], "weight_decay": 0.1}], lr=0.1, betas=(0.9, 0.99))
        weight.grad = gradient
        optimizer.step()
        optimizer.step()
        lion._CHUNK_ELEMENTS = kept
        found.append((weight.detach(), optimizer.state[weight]["exp_avg"]))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_the_reference_run_has_its_states() -> None:
    section = OptimizerSection(name="lion", lr=0.1, betas=(0.75, 0.5), weight_decay=0.5)
    model = torch.nn.Linear(3, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = ReferenceOptimizer(
        model,
        betas=section.betas,
        eps=section.eps,
        weight_decay=section.weight_decay,
        clipping=0.0,
        build=optimizer_builder(section),
        moments=OPTIMIZERS["lion"].moments,
    )
    weight = optimizer.live["weight"]
    weight.grad = torch.tensor([[4.0, -4.0, 0.0]])
    optimizer.step(0.1)
    assert torch.allclose(weight.detach(), torch.tensor([[0.85, 1.05, 0.95]]))
    states = optimizer.states(weight)
    assert set(states) == {"fp32", "exp_avg"} and optimizer.updates == 1
    assert torch.equal(states["exp_avg"], torch.tensor([[2.0, -2.0, 0.0]]))

"""The borders of a tensor-parallel region: how often they communicate."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwright.parallel.layer_compile_and_recompute import recompute_forward
from shardwright.parallel.tensor_parallel_collectives import copy_to_tensor_region


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    world = dist.group.WORLD
    assert world is not None
    try:
        yield world
    finally:
        dist.destroy_process_group()


@pytest.fixture
def reduced(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Of each all-reduce, what this rank gave."""
    given: list[torch.Tensor] = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: given.append(tensor.clone()))
    return given


def test_modules_of_one_input_reduce_its_gradient_once(
    group: dist.ProcessGroup, reduced: list[torch.Tensor]
) -> None:
    linears = [nn.Linear(4, 3, bias=False) for _ in range(3)]
    x = torch.randn(2, 4, requires_grad=True)
    for micro_batch in range(2):
        inner = x * 1
        losses = [linear(copy_to_tensor_region(inner, group)).sum() for linear in linears]
        torch.stack(losses).sum().backward()
        assert len(reduced) == micro_batch + 1
    wanted = sum(linear.weight.sum(0) for linear in linears).expand(2, 4)  # type: ignore[union-attr]
    torch.testing.assert_close(reduced[0], wanted.detach())
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 2 * wanted.detach())


def test_other_tensors_are_reduced_by_themselves(
    group: dist.ProcessGroup, reduced: list[torch.Tensor]
) -> None:
    x, y = torch.randn(2, requires_grad=True), torch.randn(2, requires_grad=True)
    parts = [copy_to_tensor_region(x * 1, group), copy_to_tensor_region(y * 1, group)]
    sum(part.sum() for part in parts).backward()  # type: ignore[union-attr]
    assert len(reduced) == 2


def test_a_tensor_that_was_written_into_is_another_one(
    group: dist.ProcessGroup, reduced: list[torch.Tensor]
) -> None:
    x = torch.randn(2, requires_grad=True) * 1
    before = copy_to_tensor_region(x, group)
    x.add_(1)
    assert copy_to_tensor_region(x, group) is not before
    with torch.no_grad():
        assert copy_to_tensor_region(x, group) is not copy_to_tensor_region(x, group)


def test_a_layer_that_is_run_again_reduces_as_often(
    group: dist.ProcessGroup, reduced: list[torch.Tensor]
) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first: torch.Tensor = self.first(copy_to_tensor_region(x, group))
            second: torch.Tensor = self.second(copy_to_tensor_region(x, group))
            return first + second

    def gradients(layer: Layer) -> list[torch.Tensor]:
        layer.zero_grad()
        layer(torch.ones(2, 4, requires_grad=True)).sum().backward()
        return [p.grad.clone() for p in layer.parameters() if p.grad is not None]

    layer = Layer()
    wanted = gradients(layer)
    recompute_forward(layer)
    for a, b in zip(gradients(layer), wanted, strict=True):
        torch.testing.assert_close(a, b)
    assert len(reduced) == 2

"""Newton-Schulz iterations against singular values, and of joined and stacked matrices."""

from __future__ import annotations

import pytest
import torch

from shardwright.layout.fused_weights import FusedOrder, JoinedMatrices
from shardwright.parallel import newton_schulz as module
from shardwright.parallel.newton_schulz import newton_schulz, orthogonalized


@pytest.mark.parametrize("shape", [(16, 16), (16, 40), (40, 16)])
def test_singular_values_come_near_one_and_vectors_stay(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(shape, dtype=torch.float64)
    found = newton_schulz(matrix, 5)
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.5 and values.max() < 1.3
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    inner = u.T @ found @ v.T
    assert (inner - inner.diagonal().diag()).abs().max() < 1e-9


def test_a_zero_update_stays_zero() -> None:
    assert not orthogonalized(torch.zeros(3, 8, 4), JoinedMatrices(), 5).any()


def test_joined_and_stacked_matrices_are_separate(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    stack = torch.randn(5, 24, 4)
    expected = torch.stack(
        [
            torch.cat(
                [
                    newton_schulz(part, 3) * max(1.0, len(part) / 4) ** 0.5
                    for part in m.split([16, 8])
                ]
            )
            for m in stack
        ]
    )
    for elements in (2**26, 2 * 24 * 4, 1):  # all experts at a time, two, one
        monkeypatch.setattr(module, "_CHUNK_ELEMENTS", elements)
        assert torch.allclose(
            orthogonalized(stack, JoinedMatrices(rows=(16, 8)), 3), expected, atol=1e-6
        )
    whole = orthogonalized(stack, JoinedMatrices(), 3)
    assert not torch.allclose(whole, expected, atol=1e-2)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_alternating_matrices_are_separate(is_transposed: bool) -> None:
    """Two heads, each with two queries of 4 features, a key and a value."""
    torch.manual_seed(0)
    stack = torch.randn(3, 32, 6)
    head = torch.arange(32).view(2, 16)
    rows = [head[:, :8].flatten(), head[:, 8:12].flatten(), head[:, 12:].flatten()]
    expected = torch.empty_like(stack)
    for each in rows:
        scale = max(1.0, len(each) / 6) ** 0.5
        expected[:, each] = newton_schulz(stack[:, each], 3) * scale
    order = FusedOrder(groups=2, is_transposed=is_transposed)
    joined = JoinedMatrices(rows=(16, 8, 8), order=order)
    held = stack.mT.contiguous() if is_transposed else stack
    found = orthogonalized(held, joined, 3)
    assert torch.allclose(found.mT if is_transposed else found, expected, atol=1e-6)

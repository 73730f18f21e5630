"""Newton-Schulz iterations against singular values, and of joined and stacked matrices."""

from __future__ import annotations

import pytest
import torch

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
    assert not orthogonalized(torch.zeros(3, 8, 4), (), 5).any()


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
        assert torch.allclose(orthogonalized(stack, (16, 8), 3), expected, atol=1e-6)
    whole = orthogonalized(stack, (), 3)
    assert not torch.allclose(whole, expected, atol=1e-2)

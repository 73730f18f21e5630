"""Experts of sizes that torch's grouped_mm refuses run by transformers' loop over the experts."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from shardwright.models.mixture_of_experts import fits_grouped_mm, use_grouped_mm_where_it_fits


def gradients(dtype: torch.dtype, implementation: str, width: int) -> list[torch.Tensor]:
    config = AutoConfig.for_model(
        "mixtral",
        hidden_size=32,
        intermediate_size=width,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        vocab_size=64,
    )
    config._experts_implementation = implementation
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(dtype)
    ids = torch.arange(3, 22)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("width", [50, 9])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_odd_sizes_train(dtype: torch.dtype, width: int) -> None:
    use_grouped_mm_where_it_fits()
    tolerance = 2e-6 if dtype == torch.float32 else 2e-2
    for own, plain in zip(
        gradients(dtype, "grouped_mm", width), gradients(dtype, "eager", width), strict=True
    ):
        assert own.isfinite().all()
        assert (own - plain).abs().max() <= tolerance * max(1.0, float(plain.abs().max()))


def test_which_sizes_fit() -> None:
    for dtype, multiple in ((torch.bfloat16, 8), (torch.float32, 4)):
        for columns, rows in (
            (multiple, 64),
            (64, multiple),
            (multiple + 1, 64),
            (64, multiple + 1),
        ):
            expected = columns % multiple == 0 and rows % multiple == 0
            assert fits_grouped_mm(torch.empty(2, rows, columns, dtype=dtype)) == expected

"""The kernels that `make bench-gpu` times, on small matrices and without a GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tools.bench_gpu.kernel_rates import (
    HEADS,
    attention,
    cast_to_fp8,
    grouped_products,
    one_product,
    product,
    product_fp8,
)


def test_each_kind_of_product_is_timed() -> None:
    for found in (
        product(64, 32, 48, device="cpu"),
        product_fp8(64, 32, 48, rowwise=False, device="cpu"),
        product_fp8(64, 32, 48, rowwise=True, device="cpu"),
        cast_to_fp8(64, 32, 48, device="cpu"),
        one_product(4, 64, 32, 48, device="cpu"),
        grouped_products(4, 64, 32, 48, device="cpu"),
    ):
        assert found and all(value > 0 for value in found.values())


@pytest.mark.parametrize("heads", HEADS)
def test_attention_is_timed_forward_and_backward(heads: str) -> None:
    queries, keys, wide, values = HEADS[heads]
    shape = (queries // 4, keys // 4, wide // 8, values // 8)
    found = attention(*shape, 64, 2, "flash" if wide == values else "math", device="cpu")
    assert found["forward_tflops"] > 0 and found["backward_tflops"] > 0

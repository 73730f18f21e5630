"""8-bit codes are torchao's."""

from __future__ import annotations

import pytest
import torch

from shardwright.parallel.block_quantization import (
    block_scales,
    dequantized,
    dynamic_map,
    quantized,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_torchaos(signed: bool) -> None:
    quant_utils = pytest.importorskip("torchao.optim.quant_utils")
    torch.manual_seed(3)
    values = torch.randn(64, 256) * torch.rand(64, 1) ** 4
    values = values if signed else values.square()
    values[5] = 0
    scales = block_scales(values.abs().amax(-1))
    wanted_map = torch.tensor(quant_utils.create_dynamic_map(signed))
    assert torch.equal(dynamic_map(signed, CPU), wanted_map)
    scaled, wanted_scales = quant_utils.scale_tensor(values, 256)
    assert torch.equal(scales, wanted_scales)
    codes = quantized(values, scales, signed)
    assert torch.equal(codes, quant_utils.quantize_8bit_with_qmap(scaled, wanted_map))
    wanted = quant_utils.dequant_with_qmap(codes, wanted_map, scales)
    assert torch.equal(dequantized(codes, scales, signed), wanted)
    assert (dequantized(codes, scales, signed)[5] == 0).all()

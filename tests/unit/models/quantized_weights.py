"""A folder's weights written anew as FP8 blocks or MXFP4, as publishers store them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

FILE = "model.safetensors"
BLOCK = 16


def quantise_fp8(folder: Path) -> int:
    """E4M3 with a scale for each block of BLOCK x BLOCK. Returns how many tensors became FP8."""
    written: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / FILE).items():
        rows, columns = tensor.shape if tensor.ndim == 2 else (1, 1)
        if "_proj" not in name or rows % BLOCK or columns % BLOCK:
            written[name] = tensor
            continue
        blocks = tensor.reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
        scales = blocks.abs().amax((1, 3)).clamp(min=1e-6) / 448
        written[name] = (
            (blocks / scales[:, None, :, None]).reshape(tensor.shape).to(torch.float8_e4m3fn)
        )
        written[f"{name}_scale_inv"] = scales.float()
    save_file(written, folder / FILE, metadata={"format": "pt"})
    _say(folder, {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]})
    return sum(tensor.dtype == torch.float8_e4m3fn for tensor in written.values())


def quantise_mxfp4(folder: Path) -> int:
    """gpt-oss's experts: 32 numbers of four bits, and a scale of eight. The numbers are drawn.
    Returns how many."""
    tensors = load_file(folder / FILE)
    experts = [
        name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    ]
    generator = torch.Generator().manual_seed(0)
    for name in experts:
        count, inner, outer = tensors.pop(name).shape
        shape = (count, outer, inner // 32)
        tensors[f"{name}_blocks"] = torch.randint(
            0, 256, (*shape, 16), dtype=torch.uint8, generator=generator
        )
        tensors[f"{name}_scales"] = torch.randint(
            118, 128, shape, dtype=torch.uint8, generator=generator
        )
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    kept = [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ]
    _say(folder, {"quant_method": "mxfp4", "modules_to_not_convert": kept})
    return len(experts)


def _say(folder: Path, section: dict[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": section}))

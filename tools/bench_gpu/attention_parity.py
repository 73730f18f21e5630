"""A training step's loss and gradients under each way of computing attention, against plain
products in fp32."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tools.bench_gpu.gpu_bench_cases import FAMILIES, TINY

LAYERS, ROWS, LENGTH, TINY_LENGTH = 4, 2, 1024, 32
SEED = 5


def parity(family: str, device: str) -> dict[str, Any]:
    """Way -> loss, relative, and gradients, by their norm, off the eager ones in fp32, the weights
    being those that bf16 holds. Eager in bf16 stands among them: what bf16 alone is off by. A way
    that is not there says why."""
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        ids = torch.randint(
            0, 256, (ROWS, LENGTH if device == "cuda" else TINY_LENGTH), device=device
        )
    wanted = _step(family, device, "eager", torch.float32, ids, nullcontext)
    found: dict[str, Any] = {}
    for name, attention, around in _ways():
        try:
            loss, gradients = _step(family, device, attention, torch.bfloat16, ids, around)
        except (RuntimeError, ImportError, ValueError) as error:
            found[name] = {"why": " ".join(str(error).split())[:200] or type(error).__name__}
            continue
        found[name] = {
            "loss": abs(loss / wanted[0] - 1),
            "gradients": float((gradients - wanted[1]).norm() / wanted[1].norm()),
        }
    return found


def _ways() -> list[tuple[str, str, Callable[[], AbstractContextManager[None]]]]:
    ways: list[tuple[str, str, Callable[[], AbstractContextManager[None]]]] = [
        ("eager", "eager", nullcontext),
        ("sdpa math", "sdpa", lambda: sdpa_kernel(SDPBackend.MATH)),
        ("sdpa flash", "sdpa", lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION)),
    ]
    if importlib.util.find_spec("flash_attn"):
        ways.append(("flash_attention_2", "flash_attention_2", nullcontext))
    return ways


def _step(
    family: str,
    device: str,
    attention: str,
    dtype: torch.dtype,
    ids: torch.Tensor,
    around: Callable[[], AbstractContextManager[None]],
) -> tuple[float, torch.Tensor]:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = dict(FAMILIES[family]) | (TINY[family] if device == "cpu" else {})
    config["n_layer" if family == "gpt2" else "num_hidden_layers"] = (
        LAYERS if device == "cuda" else 2
    )
    kind = str(config.pop("model_type"))
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        made = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(kind, **config), attn_implementation=attention
        )
    model = made.to(torch.bfloat16).to(dtype).to(device).train()
    with around():
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
    gradients = torch.cat(
        [p.grad.float().flatten() for p in model.parameters() if p.grad is not None]
    )
    return float(loss.detach().float()), gradients

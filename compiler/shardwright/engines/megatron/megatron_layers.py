"""Modules that Megatron takes from Transformer Engine where it is installed, in plain torch: they
enter through its module specs, as Transformer Engine's do. core_attention.py has the attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import nn


class TorchNorm(nn.Module):
    """LayerNorm or RMSNorm. Megatron's own asserts against sequence parallelism and weights that
    are centred on zero (megatron/core/transformer/torch_norm.py).

    Computed in fp32 and scaled in the input's type, as Hugging Face's Llama does; with zero-centred
    weights (Gemma) scaled in fp32.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps, self.centred = eps, config.layernorm_zero_centered_gamma
        self.is_rms = config.normalization == "RMSNorm"
        start = torch.zeros if self.centred else torch.ones
        device = torch.cuda.current_device()
        self.weight = nn.Parameter(start(hidden_size, dtype=config.params_dtype, device=device))
        if not self.is_rms:
            self.bias = nn.Parameter(
                torch.zeros(hidden_size, dtype=config.params_dtype, device=device)
            )
        for parameter in self.parameters():
            # Megatron sums its gradient over the ranks that have a part of the sequence each.
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_rms:
            weight = 1.0 + self.weight if self.centred else self.weight
            return F.layer_norm(x, self.weight.shape, weight, self.bias, self.eps)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.centred:
            return (wide * (1.0 + self.weight.float())).type_as(x)
        return self.weight * wide.type_as(x)


class GatheredWeightLinear(nn.Module):
    """A linear whose weight tensor ranks share out by rows, and gather before it turns a rank's
    part of the sequence into all of the features. Megatron's own gathers the features instead, and
    the gradient of the keys' rotary part, which all heads share, stays that of a rank's own heads
    (megatron/core/transformer/multi_latent_attention.py:590). Wants sequence parallelism where
    there are tensor ranks. Rows that do not divide are whole on every rank."""

    def __init__(self, config: Any, inputs: int, outputs: int) -> None:
        super().__init__()
        ranks = config.tensor_model_parallel_size
        self.is_sharded = ranks > 1 and outputs % ranks == 0
        rows = outputs // ranks if self.is_sharded else outputs
        device = torch.cuda.current_device()
        self.weight = nn.Parameter(
            torch.empty(rows, inputs, dtype=config.params_dtype, device=device)
        )
        self.weight.tensor_model_parallel = self.is_sharded  # type: ignore[attr-defined]
        self.weight.sequence_parallel = config.sequence_parallel and not self.is_sharded  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        weight = (
            gather_from_sequence_parallel_region(self.weight) if self.is_sharded else self.weight
        )
        return F.linear(x, weight), None


class LatentAttention(MLASelfAttention):  # type: ignore[misc]
    def __init__(self, config: Any, *args: Any, **more: Any) -> None:
        super().__init__(config, *args, **more)
        size = config.hidden_size
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = GatheredWeightLinear(config, size, config.q_lora_rank)
        self.linear_kv_down_proj = GatheredWeightLinear(
            config, size, config.kv_lora_rank + config.qk_pos_emb_head_dim
        )


class TransposedExpertLinear(nn.Module):
    """An expert's linear as GPT-OSS has it: the weight is (in, out). Whole on each rank: a bias of
    experts that tensor ranks cut does not run under Megatron
    (megatron/core/transformer/transformer_config.py)."""

    def __init__(self, inputs: int, outputs: int, *, config: Any, bias: bool, **_: Any) -> None:
        super().__init__()
        kind = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.weight = nn.Parameter(torch.empty(inputs, outputs, **kind))
        self.bias = nn.Parameter(torch.empty(outputs, **kind)) if bias else None
        for parameter in self.parameters():
            # No tensor rank has it twice: each counts in the gradient's norm.
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return x @ self.weight, self.bias


class InterleavedGateUpLinear(TransposedExpertLinear):
    """Columns of gate and up by turns, given one behind the other."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        out, bias = super().forward(x)
        return _deinterleave(out), None if bias is None else _deinterleave(bias)


def _deinterleave(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)

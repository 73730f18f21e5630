"""The two modules that Megatron takes from Transformer Engine where it is installed, in plain torch: they enter through
its module specs, as Transformer Engine's do."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from torch import nn


class Norm(nn.Module):
    """LayerNorm or RMSNorm. Megatron's own asserts against sequence parallelism and weights that are centred on zero
    (megatron/core/transformer/torch_norm.py).

    Computed in fp32 and scaled in the input's type, as Hugging Face's Llama does; with zero-centred weights (Gemma)
    scaled in fp32.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps, self.centred = eps, config.layernorm_zero_centered_gamma
        self.is_rms = config.normalization == "RMSNorm"
        start = torch.zeros if self.centred else torch.ones
        device = torch.cuda.current_device()
        self.weight = nn.Parameter(start(hidden_size, dtype=config.params_dtype, device=device))
        if not self.is_rms:
            self.bias = nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype, device=device))
        for parameter in self.parameters():
            # Megatron sums its gradient over the ranks that have a part of the sequence each.
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_rms:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.centred:
            return (wide * (1.0 + self.weight.float())).type_as(x)
        return self.weight * wide.type_as(x)


class Attention(MegatronModule):
    """softmax(Q K^T / sqrt(d)) V, causal, by torch's fused kernels. Megatron's own writes the S x S scores to memory
    and does not take values of another width than the keys (megatron/core/transformer/dot_product_attention.py).

    Shapes, Megatron's: query (S, B, heads, d), key (S, B, groups, d), value (S, B, groups, d_v) -> (S, B, heads * d_v).
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.scale = config.softmax_scale if softmax_scale is None else softmax_scale
        if config.apply_query_key_layer_scaling:
            raise ValueError("scores scaled by the layer's number")
        window = config.window_size
        self.window = window[0] + 1 if window is not None and _is_windowed(config, layer_number) else None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **_: Any,
    ) -> torch.Tensor:
        """attention_mask: (B, 1, S, S) bool, True where a query sees a key; None is causal."""
        length, batch, heads, _size = query.shape
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        if self.window is not None and self.window < length:
            places = torch.arange(length, device=query.device)
            near = places[:, None] - places[None, :] < self.window
            causal = places[:, None] >= places[None, :]
            attention_mask = near & (causal if attention_mask is None else attention_mask)
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=attention_mask,
            is_causal=attention_mask is None,
            scale=self.scale if self.scale is not None else 1 / math.sqrt(query.shape[-1]),
            enable_gqa=k.shape[1] != heads,
        )
        return out.permute(2, 0, 1, 3).reshape(length, batch, heads * value.shape[-1])


def _is_windowed(config: Any, layer_number: int) -> bool:
    from megatron.core.transformer.utils import is_layer_window_attention

    return bool(is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number))

"""One rank's layers. Shapes, Megatron's: (S, B, features), attention (S, B, heads, d)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from . import distributed, fp8, ops
from .fp8 import fp8_autocast

__all__ = [
    "DotProductAttention",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "Linear",
    "RMSNorm",
]
__all__ += ["Fp8Padding", "Fp8Unpadding", "distributed", "fp8", "fp8_autocast", "ops"]


def _parameter(*shape: int, like: dict[str, Any]) -> nn.Parameter:
    parameter = nn.Parameter(torch.empty(*shape, dtype=like["params_dtype"], device=like["device"]))
    vars(parameter)["tensor_model_parallel"] = True
    return parameter


def _normed(x: torch.Tensor, weight: Any, bias: Any, eps: float, centred: bool) -> torch.Tensor:
    weight = 1 + weight if centred else weight
    if bias is not None:
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


class RMSNorm(nn.Module):
    def __init__(
        self,
        normalized_shape: int | None = None,
        *,
        eps: float,
        zero_centered_gamma: bool,
        hidden_size: int | None = None,  # its name in older calls
        **more: Any,
    ) -> None:
        super().__init__()
        self.eps, self.centred = eps, zero_centered_gamma
        self.size = normalized_shape or hidden_size or 0
        self.weight = _parameter(self.size, like=more)
        self.bias: nn.Parameter | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _normed(x, self.weight, self.bias, self.eps, self.centred)


class LayerNorm(RMSNorm):
    def __init__(self, *sizes: int, **more: Any) -> None:
        super().__init__(*sizes, **more)
        self.bias = _parameter(self.size, like=more)


def _note_recipe(module: nn.Module) -> None:
    """Keeps under which recipe a linear has computed last: (its class, its format), or None."""
    open_ = fp8.recipes[-1:]
    found = (type(open_[0]).__name__, open_[0].format) if open_ else None
    vars(module)["computed_under"] = found


class Fp8Padding(nn.Module):
    """Pads each expert's tokens to whole blocks: here none is needed."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor, splits: list[int]) -> tuple[torch.Tensor, list[int]]:
        return x, splits


class Fp8Unpadding(Fp8Padding):
    def forward(self, x: torch.Tensor, splits: list[int]) -> Any:
        return x


class Linear(nn.Module):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tp_size: int,
        parallel_mode: str | None,
        bias: bool,
        return_bias: bool,
        **more: Any,
    ) -> None:
        super().__init__()
        assert tp_size == 1
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.return_bias, self.tp_size = return_bias, tp_size
        self.save_original_input = False  # Megatron-Core sets it where products are in fp8
        self.weight = _parameter(out_features, in_features, like=more)
        # An empty tensor, which is no parameter, where there is none.
        self.bias = _parameter(out_features, like=more) if bias else torch.empty(0)

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        _note_recipe(self)
        out = F.linear(
            x, self.weight, self.bias if self.use_bias and not self.return_bias else None
        )
        return (out, self.bias) if self.return_bias else out


class LayerNormLinear(Linear):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        eps: float,
        zero_centered_gamma: bool,
        normalization: str = "LayerNorm",
        return_layernorm_output: bool,
        **more: Any,
    ) -> None:
        super().__init__(in_features, out_features, **more)
        self.eps, self.centred = eps, zero_centered_gamma
        self.layer_norm_weight = _parameter(in_features, like=more)
        self.layer_norm_bias = (
            _parameter(in_features, like=more) if normalization == "LayerNorm" else None
        )

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        normed = _normed(x, self.layer_norm_weight, self.layer_norm_bias, self.eps, self.centred)
        return super().forward(normed, is_first_microbatch)


class GroupedLinear(nn.Module):
    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        return_bias: bool,
        **more: Any,
    ) -> None:
        super().__init__()
        assert not bias and not return_bias
        self.num_gemms = num_gemms
        for number in range(num_gemms):
            self.register_parameter(
                f"weight{number}", _parameter(out_features, in_features, like=more)
            )

    def forward(
        self, x: torch.Tensor, m_splits: list[int], is_first_microbatch: bool | None = None
    ) -> torch.Tensor:
        _note_recipe(self)
        pieces = x.split(m_splits)
        return torch.cat(
            [F.linear(piece, getattr(self, f"weight{at}")) for at, piece in enumerate(pieces)]
        )


class DotProductAttention(nn.Module):
    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: Any,
        *,
        attn_mask_type: str,
        softmax_scale: float | None,
        window_size: tuple[int, int] | None = None,
        **more: Any,
    ) -> None:
        super().__init__()
        size = kv_channels if isinstance(kv_channels, int) else kv_channels[0]
        self.scale = size**-0.5 if softmax_scale is None else softmax_scale
        self.window, self.kind = window_size, attn_mask_type

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, *, attn_mask_type: str
    ) -> Any:
        assert attn_mask_type == self.kind == "causal"  # which reads no mask
        length, batch, _, _ = q.shape
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        seen = torch.ones(length, length, dtype=torch.bool).tril()
        if self.window is not None:
            seen = seen.triu(-self.window[0])
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, scale=self.scale, enable_gqa=k.shape[1] != q.shape[1]
        )
        return out.permute(2, 0, 1, 3).reshape(length, batch, -1)

"""Attention for Megatron's module specs, in plain torch, over context ranks too.

Shape letters: S tokens of a row, s those of this context rank, B micro-batch, d features of a head.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import nn

from shardwright.engines.megatron.megatron_context_shards import gathered_positions, rank_positions


class TorchCoreAttention(MegatronModule):  # type: ignore[misc]
    """softmax(Q K^T * scale) V, causal, by torch's fused kernels. Megatron's own writes the S x S
    scores to memory and takes neither values of another width than the keys nor context ranks
    (megatron/core/transformer/dot_product_attention.py).

    Context ranks gather keys and values and keep their own queries (arXiv 2407.21783, 3.3.2).

    Shapes, Megatron's: query (s, B, heads, d), key (s, B, groups, d), value (s, B, groups, d_v) ->
    (s, B, heads * d_v).
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
        self.window = (
            window[0] + 1 if window is not None and _is_windowed(config, layer_number) else None
        )
        self.ranks = config.context_parallel_size
        self.softmax_offset: nn.Parameter | None = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            kind = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
            self.softmax_offset = nn.Parameter(torch.empty(heads, **kind))
            self.softmax_offset.tensor_model_parallel = True  # type: ignore[attr-defined]

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **_: Any,
    ) -> torch.Tensor:
        """attention_mask: (B, 1, s, S) bool, True where a query sees a key; None is causal."""
        length, batch, heads, _size = query.shape
        if self.ranks > 1:
            group = parallel_state.get_context_parallel_group()
            key, value = (
                gather_from_sequence_parallel_region(x, group=group) for x in (key, value)
            )
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        mask = self._mask(length, attention_mask, query.device)
        scale = self.scale if self.scale is not None else 1 / math.sqrt(query.shape[-1])
        if self.softmax_offset is None:
            out = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
                enable_gqa=k.shape[1] != heads,
            )
        else:
            out = _attention_with_sinks(q, k, v, mask, scale, self.softmax_offset)
        return out.permute(2, 0, 1, 3).reshape(length, batch, heads * value.shape[-1])

    def _mask(
        self, length: int, attention_mask: torch.Tensor | None, device: Any
    ) -> torch.Tensor | None:
        """(s, S) or (B, 1, s, S) in the order of the gathered keys. None: causal, without context
        ranks."""
        is_sharded, near = self.ranks > 1, self.window
        whole = length * self.ranks
        if not is_sharded and (near is None or near >= whole) and self.softmax_offset is None:
            return attention_mask
        keys = gathered_positions(whole, self.ranks).to(device)
        queries = keys
        if is_sharded:
            queries = rank_positions(
                whole, self.ranks, parallel_state.get_context_parallel_rank()
            ).to(device)
        visible = (
            queries[:, None] >= keys[None, :]
            if attention_mask is None
            else attention_mask[..., keys]
        )
        if near is not None:
            visible = visible & (queries[:, None] - keys[None, :] < near)
        return visible


def _attention_with_sinks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    sinks: torch.Tensor,
) -> torch.Tensor:
    """Each head has a score more, of no key (arXiv 2508.10925). Writes the scores to memory."""
    assert mask is not None
    times = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(times, dim=1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~mask, float("-inf"))
    none = sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    probabilities = torch.cat((scores, none.to(scores)), dim=-1).softmax(-1, dtype=torch.float32)
    return probabilities[..., :-1].to(v) @ v


def _is_windowed(config: Any, layer_number: int) -> bool:
    from megatron.core.transformer.utils import is_layer_window_attention

    return bool(
        is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
    )

"""Implement in plain torch the modules that Megatron takes from Transformer Engine where installed.

They enter through Megatron's module specs, as Transformer Engine's do.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.utils import is_layer_window_attention
from torch import nn

from shardwright.models.tasks.causal_lm import IGNORE_INDEX
from shardwright.parallel.micro_batches import MicroBatch

# The zigzag order of context parallelism: of 2 x ranks chunks of a sequence each rank has one from
# the front and one from the back, so that causal attention costs all the same. It is Megatron's own
# order, and its rotary angles follow it (megatron/core/models/common/embeddings/rope_utils.py,
# get_pos_emb_on_this_cp_rank).


def rank_positions(length: int, ranks: int, rank: int) -> torch.Tensor:
    """Return the rank's places in the sequence, (length / ranks,)."""
    if ranks == 1:
        return torch.arange(length)
    pieces = torch.arange(length).view(2 * ranks, -1)
    return torch.cat((pieces[rank], pieces[2 * ranks - 1 - rank]))


def gathered_positions(length: int, ranks: int) -> torch.Tensor:
    """Return the places of all ranks' chunks in rank order, (length,)."""
    return torch.cat([rank_positions(length, ranks, rank) for rank in range(ranks)])


def zigzag_shard(batch: MicroBatch, ranks: int, rank: int) -> MicroBatch:
    """Return a context rank's tokens, with labels moved to where they are predicted.

    position_ids stay those of whole sequences, from which the mask of packed documents is made.
    With one rank, return the batch itself.
    """
    if ranks == 1:
        return batch
    places = rank_positions(batch.input_ids.shape[1], ranks, rank)
    ahead = torch.cat(
        (batch.labels[:, 1:], torch.full_like(batch.labels[:, :1], IGNORE_INDEX)), dim=1
    )
    return MicroBatch(
        input_ids=batch.input_ids[:, places],
        labels=ahead[:, places],
        position_ids=batch.position_ids,
        shifted=True,
    )


# Shape letters: S tokens of a sequence, s those of this context rank, B micro-batch, d features of
# a head.


class TorchCoreAttention(MegatronModule):
    """Compute causal softmax(Q K^T * scale) V by torch's fused kernels.

    Megatron's own writes the S x S scores to memory, and supports neither context ranks nor values
    of another width than the keys (megatron/core/transformer/dot_product_attention.py). Context
    ranks gather keys and values and keep their own queries (arXiv 2407.21783, 3.3.2).

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
        self.window: int | None = None
        if window is not None and is_layer_window_attention(
            window, config.window_attn_skip_freq, layer_number
        ):
            self.window = window[0] + 1
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
        """Compute attention.

        attention_mask: (B, 1, s, S) bool, True where a query attends to a key; None is causal
        """
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
        """Return the mask in the order of the gathered keys, (s, S) or (B, 1, s, S).

        None is causal attention without context ranks.
        """
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
    """Compute attention with a learned score of no key in each head (arXiv 2508.10925).

    Writes the scores to memory.
    """
    assert mask is not None
    times = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(times, dim=1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~mask, float("-inf"))
    none = sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    probabilities = torch.cat((scores, none.to(scores)), dim=-1).softmax(-1, dtype=torch.float32)
    return probabilities[..., :-1].to(v) @ v


class TorchNorm(nn.Module):
    """Compute LayerNorm or RMSNorm.

    Megatron's own asserts against sequence parallelism and zero-centred weights
    (megatron/core/transformer/torch_norm.py). Computed in fp32 and scaled in the input's dtype, as
    Hugging Face's Llama does; zero-centred weights (Gemma) scale in fp32.
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
            # Megatron sums the gradient over the ranks that share the sequence.
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
    """Gather a linear's row-sharded weight, then map this rank's part of the sequence to all
    features.

    Megatron's own gathers the features instead; the gradient of the keys' rotary part, which all
    heads share, then covers a rank's own heads alone
    (megatron/core/transformer/multi_latent_attention.py:590). Over tensor ranks it requires
    sequence parallelism. Rows that do not divide are replicated.
    """

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
        self.weight.partition_dim = 0 if self.is_sharded else -1  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        weight = (
            gather_from_sequence_parallel_region(self.weight) if self.is_sharded else self.weight
        )
        return F.linear(x, weight), None


class PlainQueryAttention(MLASelfAttention):
    """Project queries without a low rank as they are: 0.19 puts a norm before their projection
    (megatron/core/transformer/mla_qk_norm_config.py:187)."""

    def _resolve_qk_norm_config(self, submodules: Any) -> Any:
        resolved = super()._resolve_qk_norm_config(submodules)
        if self.config.q_lora_rank is None:
            resolved["linear_q_proj"] = submodules.linear_q_proj
        return resolved


class LatentAttention(PlainQueryAttention):
    """Replace the down projections of multi-latent attention by GatheredWeightLinear."""

    def __init__(self, config: Any, *args: Any, **more: Any) -> None:
        super().__init__(config, *args, **more)
        size = config.hidden_size
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = GatheredWeightLinear(config, size, config.q_lora_rank)
        self.linear_kv_down_proj = GatheredWeightLinear(
            config, size, config.kv_lora_rank + config.qk_pos_emb_head_dim
        )


class TransposedExpertLinear(nn.Module):
    """Apply an expert's linear as GPT-OSS stores it: the weight is (in, out), replicated over
    tensor ranks.

    Megatron does not run biases of experts that tensor ranks split
    (megatron/core/transformer/transformer_config.py).
    """

    def __init__(self, inputs: int, outputs: int, *, config: Any, bias: bool, **_: Any) -> None:
        super().__init__()
        kind = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.weight = nn.Parameter(torch.empty(inputs, outputs, **kind))
        self.bias = nn.Parameter(torch.empty(outputs, **kind)) if bias else None
        for parameter in self.parameters():
            # Each tensor rank's parameter counts in the gradient norm.
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return x @ self.weight, self.bias


class InterleavedGateUpLinear(TransposedExpertLinear):
    """Return gate and up one behind the other, from a weight that interleaves their columns."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        out, bias = super().forward(x)
        return _deinterleave(out), None if bias is None else _deinterleave(bias)


def _deinterleave(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)

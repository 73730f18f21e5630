"""Stage 2's output: what the model is, counted exactly.

Shape letters: S sequence length, H hidden size, F feed-forward size, V vocabulary, L layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwright.ir.cut import Cut
from shardwright.ir.json_value import JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One tensor of the Hugging Face state dict, by its own name and unsplit shape."""

    name: str  # "model.layers.0.self_attn.q_proj.weight"
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One pipeline layer: the embedding, a decoder layer, or the head (final norm and output embedding).

    parameters: those that live here; a tied head lists the shared parameter too (`ModelGraph.tied` names it).
    matmul_flops_per_token: forward, multiply and add counted as two, embedding lookup as zero.
    attention_flops_per_token_per_position: forward, the QK^T and AV matmuls: times S gives FLOPs per token
        (full S x S attention).
    activation_elements_per_token: kept for backward with checkpointing "none", flash-like attention.
    attention_activation_elements_per_token: the part of it inside the attention module ("selective" recomputes it).
    attention_matrix_elements_per_token_per_position: score elements kept by eager attention (times S per token).
    """

    name: str  # "embedding", "model.layers.0", "head"
    kind: str  # embedding | decoder | head
    parameters: tuple[Parameter, ...]
    matmul_flops_per_token: int
    attention_flops_per_token_per_position: int
    activation_elements_per_token: int
    attention_activation_elements_per_token: int
    attention_matrix_elements_per_token_per_position: int

    @property
    def numel(self) -> int:
        return sum(p.numel for p in self.parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelGraph:
    """config: the complete HF config as plain JSON (`to_dict()`), hashed by `config_hash` (sha256 hex).

    layers: embedding, decoder layers in order, head.
    tied: groups of parameter names that are one tensor, the canonical (first) name first.
    cut: the decoder stack and how hidden states enter and leave its layers.
    attention_module: name of the attention module inside a decoder layer ("self_attn", "attn").
    tensor_styles: module path pattern (with * for the layer number) -> tensor-parallel style.
    max_dropout: the largest dropout probability in the config.
    attention: the attention implementation that will run (sdpa, eager...).
    """

    model_type: str
    architecture: str  # "LlamaForCausalLM"
    config: JsonObject
    config_hash: str
    hidden_size: int
    feed_forward_size: int
    vocabulary_size: int
    attention_heads: int
    key_value_heads: int
    head_dim: int
    max_positions: int | None
    layers: tuple[Layer, ...]
    tied: tuple[tuple[str, ...], ...]
    cut: Cut
    attention_module: str
    tensor_styles: tuple[tuple[str, str], ...]
    max_dropout: float
    attention: str

    @property
    def decoder_layers(self) -> int:
        return sum(layer.kind == "decoder" for layer in self.layers)

    @property
    def total_parameters(self) -> int:
        """Distinct parameters: a tied tensor counts once."""
        return sum({p.name: p.numel for layer in self.layers for p in layer.parameters}.values())

    def verify(self) -> None:
        """Raises ValueError where the graph contradicts itself (a bug of ours, not the user's)."""
        kinds = [layer.kind for layer in self.layers]
        if len(kinds) < 3 or kinds[0] != "embedding" or kinds[-1] != "head" or set(kinds[1:-1]) != {"decoder"}:
            raise ValueError(f"layers must be embedding, decoder..., head, not {kinds}")
        names = {p.name for layer in self.layers for p in layer.parameters}
        for group in self.tied:
            if group[0] not in names:
                raise ValueError(f"tied group {group} names no parameter of any layer")

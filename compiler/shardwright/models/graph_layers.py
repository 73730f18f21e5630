"""A layer of the ModelGraph from what was traced, and where the layer refuses, from formulas over
parameter shapes.

Shape letters: S sequence length, H hidden size, F feed-forward size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PretrainedConfig

from shardwright.models.config_sizes import first_size
from shardwright.models.layer_trace import LayerTrace
from shardwright.models.model_graph import Layer, Parameter

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN_EXPERTS = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_k",
    "top_k_experts",
    "moe_top_k",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSizes:
    """Of the text model; heads and sizes are those of the configuration, where it has them as one
    number."""

    hidden: int
    feed_forward: int
    vocabulary: int
    heads: int
    key_value_heads: int
    head_dim: int
    gated: bool
    dropout: bool


def make_layer(
    name: str,
    kind: str,
    parameters: list[Parameter],
    config: PretrainedConfig,
    shapes: TextSizes,
    traced: LayerTrace | str,
) -> Layer:
    """kind: embedding | decoder | head. FLOPs and kept bytes are the traced ones, where there are
    any. traced: the reason where it could not be."""
    matmul, scores, projections = _counted_flops(kind, parameters, config, shapes)
    backward = 2 * matmul, 2 * scores
    if isinstance(traced, LayerTrace):
        (matmul, scores), backward, projections = (
            traced.forward,
            traced.backward,
            traced.attention_module_per_token,
        )
    attention = _attention_elements(shapes) if kind == "decoder" else 0
    return Layer(
        name=name,
        kind=kind,
        parameters=tuple(parameters),
        flops_source=f"counted: {traced}" if isinstance(traced, str) else "traced",
        matmul_flops_per_token=matmul,
        attention_flops_per_token_per_position=scores,
        attention_module_flops_per_token=projections,
        backward_flops_per_token=backward[0],
        backward_flops_per_token_per_position=backward[1],
        kept=() if isinstance(traced, str) else traced.kept,
        activation_elements_per_token=_activation_elements(kind, shapes),
        attention_activation_elements_per_token=attention,
        attention_matrix_elements_per_token_per_position=(5 * shapes.heads + 1) // 2
        if kind == "decoder"
        else 0,
    )


def _counted_flops(
    kind: str, parameters: list[Parameter], config: PretrainedConfig, shapes: TextSizes
) -> tuple[int, int, int]:
    """Forward: (per token, per token and position, the attention module's part of the first)."""
    if kind == "embedding":
        return 0, 0, 0
    if kind == "head":
        return 2 * shapes.vocabulary * shapes.hidden, 0, 0
    # Q and O, K and V: two matrices each.
    projections = 4 * shapes.hidden * (shapes.heads + shapes.key_value_heads) * shapes.head_dim
    matmul = sum(_matmul_flops(p, config) for p in parameters)
    return matmul, 4 * shapes.heads * shapes.head_dim, min(projections, matmul)


def _matmul_flops(parameter: Parameter, config: PretrainedConfig) -> int:
    """Forward, per token. Experts' matrices, stacked or listed, work on the tokens that are routed
    to them only."""
    if len(parameter.shape) < 2:
        return 0
    flops = 2 * parameter.numel
    config = getattr(config, "ffn_config", config)  # dbrx keeps its experts' numbers there
    if len(parameter.shape) == 3 or ".experts." in parameter.name:
        experts = first_size(config, *_EXPERTS) or parameter.shape[0]
        return flops * min(first_size(config, *_CHOSEN_EXPERTS) or experts, experts) // experts
    return flops


def _activation_elements(kind: str, shapes: TextSizes) -> int:
    if kind == "embedding":
        return 0
    if kind == "head":
        return (
            2 * shapes.hidden
        )  # the final norm's input and output; logits are the cost model's workspace
    # Both norms' inputs and outputs; of the feed-forward (arXiv 2205.05198) the activation's input
    # and output, gated gate, up, the activated gate and the product; and two dropout masks of one
    # byte against two an element.
    norms, feed_forward = 4 * shapes.hidden, (4 if shapes.gated else 2) * shapes.feed_forward
    return (
        _attention_elements(shapes)
        + norms
        + feed_forward
        + (shapes.hidden if shapes.dropout else 0)
    )


def _attention_elements(shapes: TextSizes) -> int:
    """Per token, inside the attention module: Q, K, V and the output projection's input.

    Korthikanti et al. (arXiv 2205.05198) section 4.1, with grouped keys and values, in elements of
    two bytes and without the S x S part (kept only by eager attention); the module's input is the
    norm's output, counted with it.
    """
    return (2 * shapes.heads + 2 * shapes.key_value_heads) * shapes.head_dim

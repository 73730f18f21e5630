"""Describe a model as Megatron-Core's HybridModel, which replaces the deprecated GPTModel in 0.19.

Its stack has two layers for each decoder layer: attention, then the feed-forward network or the
experts. TransformerConfig counts both.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)

from shardwright.engines.megatron.megatron_model_configs import Settings

try:
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.models.hybrid.hybrid_model import HybridModel as HybridModel
except ImportError:  # 0.16
    HybridModel = None

LAYERS_PER_DECODER = 2
ATTENTION, LATENT_ATTENTION, FEED_FORWARD, EXPERTS = "*+-E"
"""The layers' symbols in a pattern (megatron/core/models/hybrid/hybrid_layer_allocation.py)."""
_COUNTS = ("num_layers", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
_PER_LAYER = ("window_attn_skip_freq", "moe_layer_freq")
"""Arguments of TransformerConfig that count layers, or have a value for each."""


def hybrid_model_obstacle(arguments: Settings) -> str:
    """Return why GPTModel is built; "" where HybridModel is.

    arguments: TransformerConfig's
    """
    if HybridModel is None:
        return "the installed Megatron-Core has no HybridModel"
    if arguments.get("overlap_moe_expert_parallel_comm"):
        return "HybridModel has no build_schedule_plan, by which the expert exchange overlaps"
    if arguments.get("recompute_method") == "block" and not _recomputes_all(arguments):
        return (
            "recomputing some layers, HybridModel saves the inputs of attention and of the "
            "feed-forward network, GPTModel only the former"
        )
    return ""


def hybrid_arguments(arguments: Settings) -> Settings:
    """Return TransformerConfig's arguments with two layers for each decoder layer."""
    made = {**arguments, "is_hybrid_model": True}
    for name in _COUNTS:
        if name in made:
            made[name] *= LAYERS_PER_DECODER
    for name in _PER_LAYER:
        if isinstance(made.get(name), list):
            made[name] = [value for value in made[name] for _ in range(LAYERS_PER_DECODER)]
    if stages := made.get("pipeline_model_parallel_layout"):
        made["pipeline_model_parallel_layout"] = [
            [kind for kind in stage for _ in range(_width(kind))] for stage in stages
        ]
    if made.get("recompute_method") == "block":
        # Both layers are recomputed as one, from the input of attention.
        made |= {"recompute_method": "uniform", "recompute_num_layers": LAYERS_PER_DECODER}
    return made


def _width(kind: str) -> int:
    return LAYERS_PER_DECODER if kind == "decoder" else 1


def _recomputes_all(arguments: Settings) -> bool:
    """Return whether every layer of every stage is recomputed."""
    stages = arguments.get("pipeline_model_parallel_layout")
    most = max(s.count("decoder") for s in stages) if stages else arguments["num_layers"]
    return bool(arguments["recompute_num_layers"] >= most)


def layer_has_experts(config: TransformerConfig, number: int) -> bool:
    """Return whether a layer, counted from 0, is a mixture of experts."""
    every = config.moe_layer_freq
    return bool(config.num_moe_experts) and (not isinstance(every, list) or bool(every[number]))


def layer_pattern(config: TransformerConfig) -> str:
    """Return HybridModel's pattern: a symbol for each layer, "|" between stages."""
    attention = LATENT_ATTENTION if config.multi_latent_attention else ATTENTION
    symbols = "".join(
        attention + (EXPERTS if layer_has_experts(config, number) else FEED_FORWARD)
        for number in range(0, config.num_layers, LAYERS_PER_DECODER)
    )
    stages = config.pipeline_model_parallel_layout
    if stages is None:
        return symbols
    left = iter(symbols)
    return "|".join(
        "".join(itertools.islice(left, rank[virtual].count(LayerType.decoder)))
        for virtual in range(stages.virtual_pipeline_model_parallel_size)
        for rank in stages.layout
    )


def stack_spec(layers: Mapping[bool, ModuleSpec], *, own_norm: bool) -> ModuleSpec:
    """Return the spec of HybridModel's stack.

    layers: GPTModel's specs of decoder layers, by whether they have experts
    own_norm: the caller adds the final norm; the stack's is Transformer Engine's
    """
    attention = _half(
        next(iter(layers.values())), "input_layernorm", "self_attention", "self_attn_bda"
    )
    feed_forward = {
        experts: _half(spec, "pre_mlp_layernorm", "mlp", "mlp_bda")
        for experts, spec in layers.items()
    }
    return ModuleSpec(
        module=HybridStack,
        params={"post_layer_norm": not own_norm},
        submodules=HybridStackSubmodules(
            attention_layer=attention,
            mla_layer=attention,
            **{("mlp_layer", "moe_layer")[experts]: spec for experts, spec in feed_forward.items()},
        ),
    )


def _half(layer: ModuleSpec, *parts: str) -> ModuleSpec:
    """Return a layer that has these parts of a decoder layer; the others pass their input on."""
    taken: dict[str, Any] = {part: getattr(layer.submodules, part) for part in parts}
    return ModuleSpec(module=TransformerLayer, submodules=TransformerLayerSubmodules(**taken))

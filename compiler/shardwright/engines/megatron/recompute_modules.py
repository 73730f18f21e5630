"""Say which modules of a layer Megatron-Core recomputes by themselves: its recompute_modules."""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Iterable
from pathlib import Path

from shardwright.engines.megatron.megatron_weight_mapping import MODEL_MAPPINGS
from shardwright.engines.megatron.transformer_engine_layers import (
    transformer_engine_choice,
    transformer_engine_obstacle,
)
from shardwright.layout.layout import Candidate
from shardwright.models.expert_modules import experts_per_layer
from shardwright.models.model_graph import Layer, ModelGraph
from shardwright.recipe.literal_types import RECOMPUTE_MODULES, RecomputeModule

_ACCEPTED = re.compile(r"allowed_modules = \{([^}]*)\}")
OF_EXPERTS: tuple[RecomputeModule, ...] = ("moe_act", "shared_experts", "moe")


@functools.cache
def accepted_recompute_modules() -> frozenset[str]:
    """Return the modules that the installed Megatron-Core's TransformerConfig accepts.

    Read from its source, since importing it takes seconds. Where it is not installed, or says it
    otherwise, all modules that this version knows: compiling builds the TransformerConfig.
    """
    try:
        spec = importlib.util.find_spec("megatron.core")
        places = list(spec.submodule_search_locations or ()) if spec else []
        text = Path(*places[:1], "transformer", "transformer_config.py").read_text("utf-8")
    except (ImportError, ValueError, OSError):
        return frozenset(RECOMPUTE_MODULES)
    found = _ACCEPTED.search(text)
    return frozenset(re.findall(r"\w+", found[1]) if found else RECOMPUTE_MODULES)


def recompute_obstacle(x: Candidate, module: RecomputeModule) -> str:
    """Return why the layout's ranks cannot recompute a module; "" where they can."""
    accepted = accepted_recompute_modules()
    if module not in accepted:
        from importlib import metadata

        version = metadata.version("megatron-core")
        return f"megatron-core {version} recomputes only {_listed(accepted)}"
    if missing := _missing_part(x.graph, module):
        return missing
    if module == "moe_act" and transformer_engine_choice(x) == "off":
        why = transformer_engine_obstacle(x) or "model.transformer_engine is off"
        return f"only Transformer Engine's grouped experts recompute moe_act, and {why}"
    return ""


@functools.lru_cache(maxsize=64)
def _missing_part(graph: ModelGraph, module: RecomputeModule) -> str:
    """Return what of a module the model lacks; "" where it has the module."""
    decoders = [layer for layer in graph.layers if layer.kind == "decoder"]
    if module in OF_EXPERTS and not experts_per_layer(graph):
        return "the model has no experts"
    if module == "shared_experts" and not any(map(_has_shared_experts, decoders)):
        return "the model has no shared experts"
    family = MODEL_MAPPINGS.get(graph.model_type)
    if module == "mla_up_proj" and (
        family is None or "self_attention.linear_kv_up_proj.weight" not in family.layer
    ):
        return "the model has no latent attention"
    if module == "mlp" and all(map(_has_experts, decoders)):
        return "every layer is a mixture of experts"
    return ""


def _has_experts(layer: Layer) -> bool:
    return any(".experts." in p.name for p in layer.parameters)


def _has_shared_experts(layer: Layer) -> bool:
    return any(".shared_expert" in p.name for p in layer.parameters)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))

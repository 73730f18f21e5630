"""Where GPU ranks take Megatron-Core's layers of Transformer Engine, and where this project's own
(modules.py).

Transformer Engine's run on no machine of ours, so they are taken only where they compute what the
others do, by what is written in Megatron-Core and in Transformer Engine. Line numbers are of
megatron-core 0.16.1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shardwright.diagnostics import Diagnostic, found, refusal
from shardwright.engines.megatron.megatron_weight_mapping import MODEL_MAPPINGS
from shardwright.layout.layout import Candidate
from shardwright.recipe.literal_types import AutoSwitch
from shardwright.recipe.recipe_types import DOCUMENT_KINDS, DataSection, Recipe

if TYPE_CHECKING:
    from shardwright.plan.plan import Plan

PACKAGE = "transformer-engine"
TRANSFORMER_ENGINE_AXES = ("tensor", "context", "expert_tensor")
"""Keys of a layout that decide whether they are taken."""
_FUSED = {
    "self_attention.linear_qkv": "input_layernorm",
    "mlp.linear_fc1": "pre_mlp_layernorm",
    "self_attention.linear_q_up_proj": "self_attention.q_layernorm",
    "self_attention.linear_kv_up_proj": "self_attention.kv_layernorm",
}
"""A linear of Transformer Engine that holds the norm before it -> where the other layers have that
norm."""
_NORM = re.compile(rf"({'|'.join(map(re.escape, _FUSED))})\.layer_norm_(weight|bias)")
_GROUPED = re.compile(r"mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)")


def local_layer_name(leaf: str) -> str:
    """A layer's parameter as this project's layers call it: Transformer Engine's hold norms in the
    linear behind them, and all experts in one module."""
    if norm := _NORM.fullmatch(leaf):
        return f"{_FUSED[norm[1]]}.{norm[2]}"
    if grouped := _GROUPED.fullmatch(leaf):
        return f"mlp.experts.local_experts.{grouped[3]}.{grouped[1]}.{grouped[2]}"
    return leaf


def transformer_engine_obstacle(x: Candidate) -> str:
    """What of the recipe and the layout keeps them out; "" where they may be taken."""
    s, kind, config = x.strategy, x.graph.model_type, x.graph.config
    if x.cluster.gpu.is_cpu:
        return "they run on GPUs alone"
    if x.recipe.training.precision != "bf16":
        return f"its fused attention does not take {x.recipe.training.precision}"
    if any(map(_packs, _data(x.recipe))):
        return "packed rows have a mask of their own, and its causal attention reads none"
    family = MODEL_MAPPINGS.get(kind)
    if family is not None and family.has_transposed_experts:
        return f"the experts and the attention of a {kind} are this project's own"
    is_latent = family is not None and "self_attention.linear_kv_up_proj.weight" in family.layer
    if is_latent and s.tensor * s.context > 1:
        return (
            "over tensor or context ranks its latent attention holds other parts than the plan says"
        )
    if s.context > 1 and _is_windowed(config):
        return "context ranks exchange whole rows there, and the model has windows"
    if s.expert_tensor_ranks != s.tensor:
        return "experts that tensor ranks do not cut were not followed through its gradient norm"
    return ""


def transformer_engine_choice(x: Candidate) -> AutoSwitch:
    """Of the plan: on and auto only where they may be taken."""
    return "off" if transformer_engine_obstacle(x) else x.recipe.model.transformer_engine


def transformer_engine_unavailable(x: Candidate) -> Diagnostic | None:
    why = transformer_engine_obstacle(x) if x.recipe.model.transformer_engine == "on" else ""
    if not why:
        return None
    return found(
        "SW3169",
        ("model", "transformer_engine"),
        f"transformer_engine: on, but its layers are not taken here: {why}",
        "Write `transformer_engine: auto`: this project's layers run then.",
        ("auto", "off"),
    )


def gpu_layers_text(x: Candidate) -> str:
    """Which layers a run on GPUs takes, for who has to decide whether to trust it."""
    why = "" if x.recipe.model.transformer_engine == "off" else transformer_engine_obstacle(x)
    own = "this project's own in Megatron-Core, which are verified on CPU ranks"
    if transformer_engine_choice(x) == "off":
        return f"Layers: {own}; without Transformer Engine{f': {why}' if why else ''}."
    other = (
        "" if transformer_engine_choice(x) == "on" else f" where it is installed, otherwise {own}"
    )
    return (
        f"Layers: Megatron-Core's of Transformer Engine{other}. `model.transformer_engine: off` "
        "keeps it out."
    )


def _data(recipe: Recipe) -> tuple[DataSection, ...]:
    held_out = recipe.validation.data if recipe.validation is not None else None
    sections = [data for data in (recipe.data, held_out) if data is not None]
    return tuple(part for data in sections for part in (data, *data.mixture))


def _packs(data: DataSection) -> bool:
    return data.packing and data.kind in DOCUMENT_KINDS


def _is_windowed(config: Mapping[str, Any]) -> bool:
    kinds = config.get("layer_types")
    return config.get("sliding_window") is not None and (not kinds or "sliding_attention" in kinds)


def uses_transformer_engine(plan: Plan) -> bool:
    """Collective. Whether this run's ranks take them, the same on all. Raises Refusal: SW6015 where
    the recipe wants them and they are not there, or where ranks have different ones."""
    wish = plan.model.transformer_engine
    if wish == "off" or plan.is_cpu:
        return False
    from torch import distributed as dist

    mine = _absent() or f"transformer_engine {_version()}"
    rank_layers = [mine] * plan.strategy.world_size
    dist.all_gather_object(rank_layers, mine)
    help_text = (
        "Install the same version on every host, or write `model.transformer_engine: off` "
        "and compile again."
    )
    if len(kinds := sorted(set(rank_layers))) > 1:
        ranks = "; ".join(f"{kind}: rank {rank_layers.index(kind)}" for kind in kinds)
        raise refusal("SW6015", f"Transformer Engine differs between ranks: {ranks}", help_text)
    if not _absent():
        return True
    if wish == "on":
        raise refusal("SW6015", f"model.transformer_engine is on, and {mine}", help_text)
    return False


def layers_log_line(plan: Plan, *, taken: bool) -> str:
    """A line for the log of a run on GPUs."""
    if taken:
        return f"layers: Megatron-Core's of Transformer Engine {_version()}, not tested on GPUs"
    why = "" if plan.model.transformer_engine == "off" else f": {_absent()}"
    return f"layers: this project's own in Megatron-Core, without Transformer Engine{why}"


def _version() -> str:
    from importlib import metadata

    return metadata.version(PACKAGE)


def _absent() -> str:
    """Why they cannot be taken on this host; "" where they can."""
    from importlib import metadata

    from megatron.core.extensions.transformer_engine import HAVE_TE
    from packaging.requirements import Requirement

    if not HAVE_TE:
        return "transformer_engine is not importable"
    asked = [Requirement(line) for line in metadata.requires("megatron-core") or ()]
    versions = [r.specifier for r in asked if r.name.replace("_", "-") == PACKAGE and r.specifier]
    try:
        version = _version()
    except metadata.PackageNotFoundError:
        return "transformer_engine has no version"
    if versions and not all(
        specifier.contains(version, prereleases=True) for specifier in versions
    ):
        return (
            f"transformer_engine {version} is not what this megatron-core asks for ({versions[0]})"
        )
    return ""

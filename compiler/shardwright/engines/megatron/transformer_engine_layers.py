"""Decide where GPU ranks use Transformer Engine's layers and where our own (megatron_layers.py).

Transformer Engine was not tested here, so its layers are used only where they compute the same by
Megatron-Core's and Transformer Engine's code. Line numbers are of megatron-core 0.16.1.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from shardwright.diagnostics import Diagnostic, found, refusal
from shardwright.engines.megatron.low_precision_recipes import LOW_PRECISION_RECIPES
from shardwright.engines.megatron.megatron_weight_mapping import MODEL_MAPPINGS
from shardwright.layout.layout import Candidate
from shardwright.recipe.literal_types import AutoSwitch
from shardwright.recipe.recipe_types import DOCUMENT_KINDS

if TYPE_CHECKING:
    from shardwright.plan.plan import Plan

PACKAGE = "transformer-engine"
TRANSFORMER_ENGINE_AXES = ("tensor", "context", "expert_tensor")
"""Lists the axes that decide whether they are used."""
_FUSED = {
    "self_attention.linear_qkv": "input_layernorm",
    "mlp.linear_fc1": "pre_mlp_layernorm",
    "self_attention.linear_q_up_proj": "self_attention.q_layernorm",
    "self_attention.linear_kv_up_proj": "self_attention.kv_layernorm",
}
"""Maps a linear of Transformer Engine that contains a norm to that norm's place in other layers."""
_NORM = re.compile(rf"({'|'.join(map(re.escape, _FUSED))})\.layer_norm_(weight|bias)")
_GROUPED = re.compile(r"mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)")


def local_layer_name(leaf: str) -> str:
    """Return a layer's parameter name as our layers have it.

    Transformer Engine's linears contain the norm before them, and one module holds all experts.
    """
    if norm := _NORM.fullmatch(leaf):
        return f"{_FUSED[norm[1]]}.{norm[2]}"
    if grouped := _GROUPED.fullmatch(leaf):
        return f"mlp.experts.local_experts.{grouped[3]}.{grouped[1]}.{grouped[2]}"
    return leaf


def transformer_engine_obstacle(x: Candidate) -> str:
    """Return why the recipe or the layout rules Transformer Engine out; "" where it may be used."""
    s, kind, config = x.strategy, x.graph.model_type, x.graph.config
    if x.cluster.gpu.is_cpu:
        return "Transformer Engine's layers run only on GPUs"
    if x.recipe.training.precision != "bf16":
        precision = x.recipe.training.precision
        return f"Transformer Engine's fused attention does not run in {precision}"
    data = [part for _, part in x.recipe.dataset_sections()]
    if any(part.packing and part.kind in DOCUMENT_KINDS for part in data):
        return (
            "packed sequences need an attention mask, which Transformer Engine's causal attention "
            "does not take"
        )
    family = MODEL_MAPPINGS.get(kind)
    if family is not None and family.has_transposed_experts:
        return f"the experts and the attention of {kind!r} run only in this project's own layers"
    is_latent = family is not None and "self_attention.linear_kv_up_proj.weight" in family.layer
    if is_latent and s.tensor * s.context > 1:
        return (
            "Transformer Engine's latent attention shards differently from the plan over tensor or "
            "context ranks"
        )
    kinds = config.get("layer_types")
    has_windows = not isinstance(kinds, list) or not kinds or "sliding_attention" in kinds
    if s.context > 1 and config.get("sliding_window") is not None and has_windows:
        return (
            "Transformer Engine's attention over context ranks does not support the model's "
            "sliding windows"
        )
    if s.expert_tensor_ranks != s.tensor:
        return (
            "Transformer Engine's gradient norm is not verified for experts that tensor ranks do "
            "not shard"
        )
    return ""


def transformer_engine_choice(x: Candidate) -> AutoSwitch:
    """Return the plan's value: on and auto only where Transformer Engine may be used."""
    return "off" if transformer_engine_obstacle(x) else x.recipe.model.transformer_engine


def transformer_engine_unavailable(x: Candidate) -> Diagnostic | None:
    """Transformer Engine's layers need GPUs, bf16 and data without packed documents. They are not
    used for model types whose experts are stored as (in, out), for latent attention over tensor or
    context ranks, for sliding windows over context ranks, or with tensor ranks that do not split
    the experts."""
    why = transformer_engine_obstacle(x) if x.recipe.model.transformer_engine == "on" else ""
    if not why:
        return None
    return found(
        "SW3169",
        ("model", "transformer_engine"),
        f"transformer_engine: on does not run: {why}",
        "Write `transformer_engine: auto`: this recipe then runs in this project's own layers.",
        ("auto", "off"),
    )


def low_precision_unavailable(x: Candidate) -> Diagnostic | None:
    """Under Megatron-Core, Transformer Engine's layers compute low precision. So
    `model.transformer_engine` must not be off, and the conditions listed for SW3169 must hold."""
    name = x.recipe.training.low_precision
    if name not in LOW_PRECISION_RECIPES:
        return None
    why = transformer_engine_obstacle(x)
    help = "Change the key that rules Transformer Engine out, or write `low_precision: none`."
    if not why and x.recipe.model.transformer_engine == "off":
        why, help = "model.transformer_engine is off", "Remove `transformer_engine: off`."
    if not why:
        return None
    return found(
        "SW3178",
        "training.low_precision",
        f"low_precision {name} does not run under Megatron-Core without Transformer Engine: {why}",
        help,
        ("none",),
    )


def gpu_layers_text(x: Candidate) -> str:
    """Describe which layers a run on GPUs uses, for SW3168."""
    why = "" if x.recipe.model.transformer_engine == "off" else transformer_engine_obstacle(x)
    own = "this project's own layers, which are verified on CPU ranks"
    if transformer_engine_choice(x) == "off":
        return f"The run uses {own}, without Transformer Engine{f': {why}' if why else ''}."
    other = "" if transformer_engine_choice(x) == "on" else f" where installed, otherwise {own}"
    if (low_precision := x.recipe.training.low_precision) in LOW_PRECISION_RECIPES:
        untested = f"{low_precision} kernels no test has run"
        return f"The run uses Transformer Engine's layers, whose {untested}."
    return (
        f"The run uses Transformer Engine's layers{other}. Write `model.transformer_engine: off` "
        "to run without Transformer Engine."
    )


def uses_transformer_engine(plan: Plan) -> bool:
    """Return whether this run's ranks use Transformer Engine, the same on all. Collective.

    Raises Refusal, SW6015, where the recipe requires it and it is missing, or where ranks differ.
    """
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
        raise refusal("SW6015", f"model.transformer_engine is on, but {mine}", help_text)
    if "moe_act" in plan.strategy.recompute_modules:
        raise refusal(
            "SW6015",
            "activation_checkpointing recomputes moe_act, which needs Transformer Engine, but "
            f"{mine}",
            "Install Transformer Engine on every host, or compile again without moe_act.",
        )
    return False


def check_low_precision(plan: Plan, *, taken: bool) -> None:
    """Raise SW6015 where these ranks have no kernels for the plan's low precision.

    taken: the ranks use Transformer Engine
    """
    if plan.low_precision is None:
        return
    from packaging.version import Version

    name = plan.low_precision.format
    first = LOW_PRECISION_RECIPES[name].version
    if taken and Version(_version()) >= Version(first):
        return
    why = f"{_version()} is installed" if taken else _absent()
    raise refusal(
        "SW6015",
        f"training.low_precision {name} needs Transformer Engine {first} or later, but {why}",
        f"Install Transformer Engine {first} or later on every host, or write "
        "`training.low_precision: none` and compile again.",
    )


def layers_log_line(plan: Plan, *, taken: bool) -> str:
    """Return the log line of a run on GPUs that names its layers."""
    if taken:
        return f"layers: those of Transformer Engine {_version()}, not tested on GPUs"
    why = "" if plan.model.transformer_engine == "off" else f": {_absent()}"
    return f"layers: this project's own, without Transformer Engine{why}"


def _version() -> str:
    from importlib import metadata

    return metadata.version(PACKAGE)


def _absent() -> str:
    """Return why Transformer Engine cannot be used on this host; "" where it can."""
    from importlib import metadata

    from megatron.core.extensions.transformer_engine import HAVE_TE
    from packaging.requirements import Requirement

    if not HAVE_TE:
        return "transformer_engine cannot be imported"
    asked = [Requirement(line) for line in metadata.requires("megatron-core") or ()]
    versions = [r.specifier for r in asked if r.name.replace("_", "-") == PACKAGE and r.specifier]
    try:
        version = _version()
    except metadata.PackageNotFoundError:
        return "the installed transformer_engine tells no version"
    if versions and not all(
        specifier.contains(version, prereleases=True) for specifier in versions
    ):
        return (
            f"transformer_engine {version} is not a version that this megatron-core supports "
            f"({versions[0]})"
        )
    return ""

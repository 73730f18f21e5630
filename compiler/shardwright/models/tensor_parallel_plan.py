"""Choose the tensor-parallel style of each module: transformers' plan, a map defined here, or the
fallback.

`make prove` (tests/zoo) compares each type's tiny copy over two tensor ranks with one process, and
writes the verified types to tensor_verified.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from shardwright.models.hf_config import head_counts
from shardwright.models.model_graph import (
    COLUMN_STYLES,
    GROUPED_QKV,
    MULTI_QUERY,
    ROW_STYLES,
    name_pattern,
)
from shardwright.models.tasks.sequence_classification import HEAD

# Tensor-parallel maps for families without a plan in transformers, and additions to its plans.
# Paths are relative to the base model; * is any number. tests/zoo verifies them.


_QKV = ("q_proj", "k_proj", "v_proj")
_BLOOM = (
    "h.*",
    "self_attention",
    ("query_key_value",),
    "dense",
    ("mlp.dense_h_to_4h",),
    "mlp.dense_4h_to_h",
)


def _decoder_layer(
    layer: str,
    attention: str,
    qkv: tuple[str, ...],
    out: str,
    up: tuple[str, ...],
    down: str,
    style: str = "colwise",
) -> dict[str, str]:
    """Map a layer: attention split by heads, feed-forward by features.

    style: style of the modules in `qkv`.
    """
    attention = f"{layer}.{attention}"
    return {
        attention: "local_heads",
        **{f"{attention}.{name}": style for name in qkv},
        f"{attention}.{out}": "rowwise",
        **{f"{layer}.{name}": "colwise" for name in up},
        f"{layer}.{down}": "rowwise",
    }


TP_PLANS: dict[str, Mapping[str, str]] = {
    "gpt2": _decoder_layer(
        "h.*", "attn", ("c_attn",), "c_proj", ("mlp.c_fc",), "mlp.c_proj", "fused_qkv_colwise"
    ),
    "opt": _decoder_layer("decoder.layers.*", "self_attn", _QKV, "out_proj", ("fc1",), "fc2"),
    # q, k, v are concatenated within each head, so splitting by heads is enough. ALiBi is per head.
    "bloom": _decoder_layer(*_BLOOM),
    # Fused per key/value head; with one such head (7b) `multi_query_colwise` is used instead.
    "falcon": _decoder_layer(*_BLOOM, "grouped_qkv_colwise"),
    "gpt_bigcode": _decoder_layer(
        "h.*", "attn", ("c_attn",), "c_proj", ("mlp.c_fc",), "mlp.c_proj", "grouped_qkv_colwise"
    ),
    "stablelm": _decoder_layer(
        "layers.*", "self_attn", _QKV, "o_proj", ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj"
    ),
    "gptj": _decoder_layer("h.*", "attn", _QKV, "out_proj", ("mlp.fc_in",), "mlp.fc_out"),
    "gpt_neo": _decoder_layer(
        "h.*", "attn.attention", _QKV, "out_proj", ("mlp.c_fc",), "mlp.c_proj"
    ),
    "mpt": _decoder_layer(
        "blocks.*",
        "attn",
        ("Wqkv",),
        "out_proj",
        ("ffn.up_proj",),
        "ffn.down_proj",
        "fused_qkv_colwise",
    ),
    "gpt_oss": {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.sinks": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.experts": "moe_tp_experts",
        # Gate and up are interleaved, feature by feature.
        "layers.*.mlp.experts.gate_up_proj": "rowwise",
        "layers.*.mlp.experts.gate_up_proj_bias": "rowwise",
        "layers.*.mlp.experts.down_proj": "colwise",
    },
}
TP_PLANS["gpt-sw3"] = TP_PLANS["gpt2"]

_LATENT_ATTENTION: Mapping[str, str] = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.q_b_proj": "colwise",
    "layers.*.self_attn.kv_a_proj_with_mqa": "mla_kv_a_proj",
    "layers.*.self_attn.kv_b_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
}
"""transformers' map for DeepSeek-V2's attention; its plans of later models leave the attention
out."""

TP_PLAN_ADDITIONS: dict[str, Mapping[str, str]] = {
    # Learned parameters of the activation, which each rank applies to its own features.
    "apertus": {"layers.*.mlp.act_fn": "replicated_with_grad_allreduce"},
    "axk1": _LATENT_ATTENTION,
    "deepseek_v3": _LATENT_ATTENTION,
    "youtu": _LATENT_ATTENTION,
    # A norm with a row for every head.
    "cohere": {
        "layers.*.self_attn.q_norm.weight": "colwise",
        "layers.*.self_attn.k_norm.weight": "colwise",
    },
    # Norms that each rank applies to its own heads.
    "glm4_moe": {
        f"layers.*.self_attn.{norm}": "replicated_with_grad_allreduce"
        for norm in ("q_norm", "k_norm")
    },
    "phi": {
        f"layers.*.self_attn.{norm}": "replicated_with_grad_allreduce"
        for norm in ("q_layernorm", "k_layernorm")
    },
}
TP_PLAN_ADDITIONS["sarvam_moe"] = TP_PLAN_ADDITIONS["glm4_moe"]
TP_PLAN_ADDITIONS["apertus1p5_text"] = TP_PLAN_ADDITIONS["apertus"]

WEIGHT_ONLY_LINEARS = ("dt_proj", "classifier")
"""Linears whose owner reads the weight and never calls them (Mamba's, Longcat's router); they stay
unsharded."""


SUPPORTED_STYLES = frozenset(
    {
        *COLUMN_STYLES,
        *ROW_STYLES,
        *("moe_tp_experts", "all_reduce", "moe_identity_expert", "replicated_with_grad_allreduce"),
        *("local_heads", "local_params"),
    }
)
"""Styles that parallel/tensor_parallel.py implements; a module with another style stays
unsharded."""

Proved = str | dict[str, str]
"""sharded | fallback | {"refused": reason}"""


@lru_cache(maxsize=1)
def proved() -> dict[str, Proved]:
    """Return what is verified for each model type; one dictionary a process, which a proof may
    override.

    tensor_vlm.json holds text parts of vision-language models that are no model type
    (tests/parity/test_vision_language.py).
    """
    return cast("dict[str, Proved]", {**_read("tensor_vlm.json"), **_read("tensor_verified.json")})


@lru_cache(maxsize=1)
def unsplit_parameters() -> dict[str, list[str]]:
    """Return, for each sharded type, the decoder-layer parameters left unsharded in its proof, by
    path in a layer."""
    return cast("dict[str, list[str]]", _read("tensor_unsplit.json"))


def _read(name: str) -> Any:
    return json.loads(
        resources.files("shardwright.models").joinpath(name).read_text(encoding="utf-8")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorStyles:
    """Hold ModelGraph's fields of these names, without the prefix tensor_parallel_."""

    kind: str
    reason: str
    styles: tuple[tuple[str, str], ...]
    heads: tuple[tuple[str, int], ...]


def tensor_parallel_styles(model: PreTrainedModel, model_type: str, stack: str) -> TensorStyles:
    """Return the styles of a model. Modules outside the decoder layers stay unsharded, except the
    vocabulary.

    model: on the meta device.
    model_type: the configuration's, of a vision-language model its text part's.
    stack: path of the decoder layers.
    """
    verdict = proved().get(model_type, {"refused": "nobody has proved it"})
    if isinstance(verdict, dict):
        return TensorStyles(kind="", reason=verdict["refused"], styles=(), heads=())
    if verdict == "sharded":
        planned = _planned(model, model_type, stack)
        styles = {**planned, **_gathered(model, stack, planned), **_vocabulary(model)}
        if planned and not _is_unverified(model, model_type, stack, styles):
            return TensorStyles(
                kind="sharded", reason="", styles=tuple(styles.items()), heads=_heads(model, styles)
            )
    styles = {**_gathered(model, stack, {}), **_vocabulary(model)}
    return TensorStyles(kind="fallback", reason="", styles=tuple(styles.items()), heads=())


def _planned(model: PreTrainedModel, model_type: str, stack: str) -> dict[str, str]:
    """Return the part of the plan that lies in the decoder stack, by path patterns of the whole
    model."""
    base = model.base_model_prefix
    own: Mapping[str, str] = TP_PLANS.get(model_type, {})
    plan = {f"{base}.{path}": style for path, style in own.items()} or dict(model.tp_plan or {})
    plan |= {
        f"{base}.{path}": style for path, style in TP_PLAN_ADDITIONS.get(model_type, {}).items()
    }
    inside = name_pattern(stack + ".0") + "."
    known = {name_pattern(name) for name, _ in (*model.named_modules(), *model.named_parameters())}
    styles: dict[str, str] = {}
    for path, style in plan.items():
        if not path.startswith(inside) or path not in known or style not in SUPPORTED_STYLES:
            continue
        if style == GROUPED_QKV:
            module = path.rpartition(".")[0]
            attention = next(m for n, m in model.named_modules() if name_pattern(n) == module)
            heads, key_value_heads = head_counts(attention, model.config.get_text_config())
            if key_value_heads == 1 < heads:  # a single key/value head must not be split
                style = MULTI_QUERY
        styles[path] = style
    return styles


def _gathered(model: PreTrainedModel, stack: str, styles: Mapping[str, str]) -> dict[str, str]:
    """Give every linear of a decoder layer without a style its own column split with gathered
    output."""
    found: dict[str, str] = {}
    for name, module in model.get_submodule(stack).named_modules(prefix=stack):
        path = name_pattern(name)
        # A router may be a linear by name only.
        is_linear = type(module).forward in (nn.Linear.forward, Conv1D.forward)
        if is_linear and path not in styles and path.rpartition(".")[2] not in WEIGHT_ONLY_LINEARS:
            found[path] = "colwise_gather_output"
    return found


def _vocabulary(model: PreTrainedModel) -> dict[str, str]:
    """Split the embedding and the head by vocabulary, under every name of their parameters."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_reward_model = isinstance(getattr(model, HEAD, None), nn.Linear)
    if is_reward_model and isinstance(table, nn.Embedding) and table.max_norm is None:
        # Its head is one row, which every rank has.
        return {n: "vocabulary_embedding" for n, m in model.named_modules() if m is table}
    if not isinstance(head, nn.Linear):
        return {}
    tied = isinstance(table, nn.Module) and table.weight is head.weight
    cut = {id(p): "vocabulary_head" for p in head.parameters()}
    styles: dict[str, str] = {}
    if isinstance(table, nn.Embedding) and table.max_norm is None:
        cut |= {id(table.weight): "vocabulary_embedding"}
        styles |= {name: "vocabulary_embedding" for name, m in model.named_modules() if m is table}
    elif tied:
        return {}  # a tied table that cannot be split keeps the head unsharded
    styles |= {name: "vocabulary_head" for name, m in model.named_modules() if m is head}
    # A bias may belong to two modules: the parameter's own name says how it is cut.
    for name, parameter in model.named_parameters():
        if id(parameter) in cut and name.rpartition(".")[0] not in styles:
            styles[name] = cut[id(parameter)]
    return styles


def _heads(model: PreTrainedModel, styles: Mapping[str, str]) -> tuple[tuple[str, int], ...]:
    """Return the number of heads of each module that is split by heads.

    These are column-split siblings of a row-split linear in an attention module, and single
    parameters with a row for each head.
    """
    rows = {path.rpartition(".")[0] for path, style in styles.items() if style == "rowwise"}
    config = model.config.get_text_config()
    modules = dict(model.named_modules())
    found: dict[str, dict[str, int]] = {}
    for name, parameter in model.named_parameters():
        module = name.rpartition(".")[0]
        whole_linear = name_pattern(module) in styles
        cut = module if whole_linear else name
        style = styles.get(name_pattern(cut))
        parent = cut.rpartition(".")[0]
        while parent and name_pattern(parent) not in rows:
            parent = parent.rpartition(".")[0]
        attention = modules[parent]
        latent = hasattr(attention, "kv_lora_rank")  # every head has its own key and value
        if (
            style not in ("colwise", GROUPED_QKV)
            or not parent
            or not (latent or hasattr(attention, "head_dim"))
        ):
            continue
        heads, key_value_heads = head_counts(attention, config)
        width = parameter.shape[0] // (getattr(attention, "head_dim", 1) if whole_linear else 1)
        shared = style == GROUPED_QKV or width == key_value_heads or width % heads > 0
        found.setdefault(name_pattern(cut), {})[cut] = (
            key_value_heads if shared and not latent else heads
        )
    units: list[tuple[str, int]] = []
    for path, counts in found.items():
        alike = set(counts.values())
        units += [(path, alike.pop())] if len(alike) == 1 else list(counts.items())
    return tuple(units)


def _is_unverified(
    model: PreTrainedModel, model_type: str, stack: str, styles: Mapping[str, str]
) -> bool:
    """Return whether these styles leave a parameter unsharded that the type's proof did not.

    A configuration may add a small parameter that works on split features (a norm over one rank's
    heads), whose gradient is one rank's share.
    """
    known = unsplit_parameters().get(model_type)
    inside = name_pattern(stack + ".0") + "."
    names = {name_pattern(name) for name, _ in model.named_parameters()}
    unsharded = (None, "local_params", "local_heads")  # styles that leave a module's parameters
    whole = {
        name.removeprefix(inside)
        for name in names
        if name.startswith(inside)
        and name not in styles
        and styles.get(name.rpartition(".")[0]) in unsharded
    }
    return known is not None and not whole <= set(known)

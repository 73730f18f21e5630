"""The rules about attention: what can be recomputed of it, what keeps packed documents apart, where
its kernels run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwright.diagnostics import Diagnostic, found
from shardwright.layout.formats import FORMATS
from shardwright.layout.layout import Candidate
from shardwright.layout.tensor_parallel_map import is_attention_sharded
from shardwright.recipe.recipe_types import FLASH_ATTENTION_2
from shardwright.utils.divisors import nearest_divisors, nearest_multiples

FLASH_HEAD_SIZE = 256


def attention_module_exists(x: Candidate) -> Diagnostic | None:
    """Selective checkpointing recomputes the attention module of each layer, so all layers need an
    attention module of the same name."""
    if x.strategy.activation_checkpointing != "selective" or x.graph.attention_module:
        return None
    return found(
        "SW3124",
        "parallelism.activation_checkpointing",
        (
            f"the layers of model_type {x.graph.model_type!r} have no attention module in common "
            "to recompute"
        ),
        "Use activation_checkpointing: full or none.",
    )


def packed_documents_kept_separate(x: Candidate) -> Diagnostic | None:
    """Packed documents are kept apart only by their position ids, from which attention masks are
    made. A tiny copy of the model verifies whether these suffice (models/model_probe.py). State
    space models and recurrent layers read across documents."""
    packed = [key for key, part in x.recipe.dataset_sections() if part.joins_documents]
    if not packed or not x.graph.packing:
        return None
    return found(
        "SW3125",
        (*packed[0], "packing"),
        f"a {x.graph.model_type!r} with {x.graph.attention} attention does not keep packed "
        f"documents apart: {x.graph.packing}",
        f"Write `packing: false` under {'.'.join(map(str, packed[0]))}: then all text is one "
        "stream that is split into sequences, and each conversation or completion has a sequence "
        "of its own.",
    )


def packed_rope_length(x: Candidate) -> Diagnostic | None:
    """Rotary embeddings of some kinds (dynamic, longrope) choose their frequencies by the longest
    document of a packed sequence, so a document would be trained with frequencies that depend on
    the other documents. Up to the length at which the frequencies change, packing is safe."""
    packed = [key for key, part in x.recipe.dataset_sections() if part.joins_documents]
    switches = length_switches(x.graph.config)
    length = x.recipe.training.sequence_length
    if not packed or all(length <= switch for _, switch in switches):
        return None
    kind, switch = min(switches, key=lambda each: each[1])
    return found(
        "SW3136",
        (*packed[0], "packing"),
        f"rotary embeddings of type {kind!r} change beyond {switch} tokens: in a packed sequence "
        f"of {length} tokens the longest document would decide for all documents",
        f"Write `packing: false` under {'.'.join(map(str, packed[0]))}, or use a sequence_length "
        f"of at most {switch}.",
    )


def length_switches(config: Mapping[str, Any]) -> list[tuple[str, int]]:
    """(kind, the longest sequence that it leaves as it is) of each rotary table that depends on the
    length."""
    tables = config.get("rope_parameters") or config.get("rope_scaling")
    switches: list[tuple[str, int]] = []
    if isinstance(tables, dict):
        nested = [table for table in tables.values() if isinstance(table, dict)]
        for table in nested or [tables]:
            kind = str(table.get("rope_type", table.get("type", "")))
            switch = config.get("max_position_embeddings")
            if kind == "longrope":
                switch = table.get(
                    "original_max_position_embeddings",
                    config.get("original_max_position_embeddings"),
                )
            if (kind == "longrope" or "dynamic" in kind) and isinstance(switch, int):
                switches.append((kind, switch))
    parts = (
        value for value in config.values() if isinstance(value, dict) and "model_type" in value
    )
    return [*switches, *(each for part in parts for each in length_switches(part))]


def flash_attention_supported(x: Candidate) -> Diagnostic | None:
    """flash-attn 2 has kernels for fp16 and bf16, for Ampere and newer GPUs, and for head sizes up
    to 256 (its README, "NVIDIA CUDA Support")."""
    gpu, precision = x.cluster.gpu, x.recipe.training.precision
    if x.graph.attention != FLASH_ATTENTION_2:
        return None
    precision_help = ""
    if gpu.is_cpu or "bf16" not in gpu.peak_flops:
        why = (
            f"has no kernels for the gpu {gpu.name}: they need a GPU that computes in bf16, Ampere "
            "or newer"
        )
    elif not FORMATS[precision].flash_attention:
        why = f"has no kernels for precision {precision}"
        precision_help = "`precision: bf16` or "
    elif x.graph.head_dim > FLASH_HEAD_SIZE:
        why = f"supports head sizes up to {FLASH_HEAD_SIZE}, and the model's is {x.graph.head_dim}"
    else:
        return None
    return found(
        "SW3128",
        "model.attention",
        f"flash attention {why}",
        f"Write {precision_help}`attention: sdpa`, which uses torch's own fused kernels.",
    )


# What context ranks (modules/context/) do not run: sizes that do not divide, models that look
# beyond a token, and dropout, which is not verified with them.


_KEY = "parallelism.context"


def context_divides_sequence(x: Candidate) -> Diagnostic | None:
    """Each context rank takes an equal number of the tokens of every sequence."""
    s, length = x.strategy.context, x.recipe.training.sequence_length
    if length % s == 0:
        return None
    return found(
        "SW3141",
        "training.sequence_length",
        f"sequence_length {length} is not a multiple of context {s}",
        f"Choose a context degree that divides {length}, or change sequence_length to a multiple "
        f"of {s}.",
        nearest_multiples(s, length),
    )


def context_divides_heads(x: Candidate) -> Diagnostic | None:
    """In attention each context rank computes an equal share of its tensor rank's heads, over all
    tokens of a sequence. Key and value heads that the context ranks do not divide are repeated."""
    s = x.strategy
    if x.graph.context_parallel_reason:  # reported as SW3143
        return None
    own = x.graph.attention_heads // (s.tensor if is_attention_sharded(x.graph) else 1)
    if s.context == 1 or own % s.context == 0:
        return None
    return found(
        "SW3142",
        _KEY,
        f"context {s.context} does not divide the {own} attention heads of a tensor rank",
        f"Choose a context degree that divides {own}.",
        nearest_divisors(own, s.context),
    )


def context_parallel_supported(x: Candidate) -> Diagnostic | None:
    """Context parallelism splits each sequence over ranks. Whether a model computes the same on
    parts of a sequence is tested on a tiny copy of its configuration when the model is traced."""
    why = x.graph.context_parallel_reason
    if x.strategy.context == 1 or not why:
        return None
    return found(
        "SW3143",
        _KEY,
        f"sequences of a {x.graph.model_type!r} cannot be split over context ranks: {why}",
        (
            "Use context: 1. Activation checkpointing, `loss: chunked` and tensor parallelism also "
            "reduce the memory of long sequences."
        ),
        (1,),
    )


def context_without_dropout(x: Candidate) -> Diagnostic | None:
    """Each context rank would draw dropout masks for its own tokens, and in attention for its own
    heads. Such a run has not been compared with a single-process run."""
    largest = max(x.graph.max_dropout, 0.0 if x.recipe.lora is None else x.recipe.lora.dropout)
    if x.strategy.context == 1 or largest == 0:
        return None
    return found(
        "SW3144",
        _KEY,
        (
            f"context {x.strategy.context} with dropout {largest:g} is not verified against a "
            "single-process run"
        ),
        "Use context: 1, or set dropout to 0 (keys of model.config, and lora.dropout).",
        (1,),
    )

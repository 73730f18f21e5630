"""The rules about attention: what can be recomputed of it, what keeps packed documents apart, where
its kernels run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwright.diagnostics import Diagnostic, found
from shardwright.layout.layout_rule import Candidate
from shardwright.recipe.recipe_types import DOCUMENT_KINDS, FLASH_ATTENTION_2

FLASH_HEAD_SIZE = 256


def attention_module_exists(x: Candidate) -> Diagnostic | None:
    """Selective checkpointing recomputes the attention module: there must be one."""
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
    """Packing keeps documents apart by their positions, which every mask is given; whether that is
    enough is proved by running a tiny copy of the model (models/packing_probe.py). State space
    models and recurrences read on across documents."""
    packed = [
        key
        for key, part in x.recipe.dataset_sections()
        if part.kind in DOCUMENT_KINDS and part.packing
    ]
    if not packed or not x.graph.packing:
        return None
    return found(
        "SW3125",
        (*packed[0], "packing"),
        f"a {x.graph.model_type!r} with {x.graph.attention} attention does not keep packed "
        f"documents apart: {x.graph.packing}",
        f"Write `packing: false` under {'.'.join(map(str, packed[0]))}: one stream of text cut "
        "into sequences; a conversation a sequence.",
    )


def packed_rope_length(x: Candidate) -> Diagnostic | None:
    """Rotary embeddings of some kinds (dynamic, longrope) choose their frequencies by the longest
    document of a packed sequence: what a document is trained with would depend on its neighbours.
    Below the switch nothing depends on it."""
    packed = [
        key
        for key, part in x.recipe.dataset_sections()
        if part.kind in DOCUMENT_KINDS and part.packing
    ]
    switches = length_switches(x.graph.config)
    length = x.recipe.training.sequence_length
    if not packed or all(length <= switch for _, switch in switches):
        return None
    kind, switch = min(switches, key=lambda each: each[1])
    return found(
        "SW3136",
        (*packed[0], "packing"),
        f"rotary embeddings of type {kind!r} change beyond {switch} tokens: in a packed sequence "
        f"of {length} the longest document would decide for all",
        (
            "Write `packing: false`, which gives each sequence one length, or a sequence_length of "
            f"at most {switch}."
        ),
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
    """flash-attn 2 (README, "NVIDIA CUDA Support"): fp16 and bf16, Ampere or newer, head sizes up
    to 256."""
    gpu, precision = x.cluster.gpu, x.recipe.training.precision
    if x.graph.attention != FLASH_ATTENTION_2:
        return None
    if gpu.is_cpu or "bf16" not in gpu.peak_flops:
        why = (
            f"has no kernels for the gpu {gpu.name}: it takes GPUs that compute in bf16, Ampere "
            "or newer"
        )
    elif precision == "fp32":
        why = "has no kernels for fp32: write `precision: bf16`, or another attention"
    elif x.graph.head_dim > FLASH_HEAD_SIZE:
        why = f"takes heads of at most {FLASH_HEAD_SIZE}, and the model's have {x.graph.head_dim}"
    else:
        return None
    return found(
        "SW3128",
        "model.attention",
        f"flash attention {why}",
        "Write `attention: sdpa`, which takes torch's own fused kernels.",
    )

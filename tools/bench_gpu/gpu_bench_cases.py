"""The layouts of the bench on one GPU: three families of models, each as people fit one on a
card."""

from __future__ import annotations

import copy
import hashlib
import json
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from shardwright.layout.gpu_cluster import catalogue, without_pcie_boards

FAMILIES: dict[str, dict[str, Any]] = {
    # meta-llama/Llama-3.2-1B, Qwen/Qwen3-0.6B and openai-community/gpt2-large, by their
    # configurations.
    "llama": {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "qwen3": {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 1280,
        "n_layer": 36,
        "n_head": 20,
        "vocab_size": 50257,
        "n_positions": 1024,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
}
TINY: dict[str, dict[str, int]] = {
    "llama": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    | {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256},
    "qwen3": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    | {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 256, "n_positions": 64},
}
TINY_LENGTH = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchCase:
    """length: of a row. model, training, parallelism: keys of those sections. alone: not beside the
    HF Trainer, which does not know it."""

    family: str
    length: int
    micro: int
    accumulation: int = 1
    model: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    parallelism: dict[str, Any] = field(default_factory=dict)
    alone: bool = False


def _full(count: int) -> dict[str, Any]:
    return {"activation_checkpointing": {"full": count}}


_ALL = {"activation_checkpointing": "full"}
_llama_4 = partial(BenchCase, family="llama", length=4096, micro=4)
LAYOUTS: dict[str, BenchCase] = {
    "llama-1": BenchCase(family="llama", length=4096, micro=1, accumulation=4),
    "llama-4": _llama_4(),
    "llama-8-full": BenchCase(family="llama", length=4096, micro=8, parallelism=_ALL),
    "llama-4-half": _llama_4(parallelism=_full(8), alone=True),
    "llama-4-chunked": _llama_4(model={"loss": "chunked"}, alone=True),
    "llama-1-fp32": BenchCase(family="llama", length=2048, micro=1, training={"precision": "fp32"}),
    "llama-4-sums-bf16": _llama_4(training={"gradient_accumulation_dtype": "bf16"}),
    "llama-4-offload": _llama_4(parallelism={"zero_stage": 2, "offload": "optimizer"}),
    "llama-4-zero3": _llama_4(parallelism={"zero_stage": 3}),
    "llama-4-compile": _llama_4(model={"kernels": "compile"}, alone=True),
    "llama-4-fp8": _llama_4(training={"low_precision": "fp8_tensorwise"}, alone=True),
    "llama-4-fp8-compile": _llama_4(
        model={"kernels": "compile"}, training={"low_precision": "fp8_tensorwise"}, alone=True
    ),
    "llama-4-fp8-rowwise-compile": _llama_4(
        model={"kernels": "compile"}, training={"low_precision": "fp8_rowwise"}, alone=True
    ),
    "llama-4-muon": _llama_4(training={"optimizer": {"name": "muon"}}, alone=True),
    "llama-4-8bit": _llama_4(
        training={"optimizer": {"name": "adamw_8bit", "lr": 1e-4}}, alone=True
    ),
    "qwen3-8": BenchCase(family="qwen3", length=2048, micro=8),
    "qwen3-16-full": BenchCase(family="qwen3", length=2048, micro=16, parallelism=_ALL),
    "qwen3-4-eager": BenchCase(family="qwen3", length=2048, micro=4, model={"attention": "eager"}),
    "qwen3-2-long": BenchCase(family="qwen3", length=8192, micro=2, parallelism=_ALL),
    "gpt2-8": BenchCase(family="gpt2", length=1024, micro=8),
    "gpt2-32-full": BenchCase(family="gpt2", length=1024, micro=32, parallelism=_ALL),
    "gpt2-16-selective": BenchCase(
        family="gpt2",
        length=1024,
        micro=16,
        parallelism={"activation_checkpointing": "selective"},
        alone=True,
    ),
    "gpt2-8-fp16": BenchCase(family="gpt2", length=1024, micro=8, training={"precision": "fp16"}),
}


def recipe(layout: BenchCase, gpu: str) -> dict[str, Any]:
    """gpu: a name of the catalogue; on "cpu" everything is tiny."""
    tiny, config = gpu == "cpu", copy.deepcopy(FAMILIES[layout.family])
    parallelism: dict[str, Any] = {"activation_checkpointing": "none", **layout.parallelism}
    if tiny:
        config |= TINY[layout.family]
        if isinstance(parallelism["activation_checkpointing"], dict):
            parallelism |= _full(1)
    return {
        "version": 1,
        "name": "bench-gpu",
        "model": {"config": config, "weights": "random", **layout.model},
        "cluster": {
            "nodes": 1,
            "gpus_per_node": 1,
            "gpu": gpu,
            **({} if tiny else {"host_memory_gib": 100}),
        },
        "training": {
            "sequence_length": TINY_LENGTH if tiny else layout.length,
            "global_batch_size": layout.micro * layout.accumulation,
            "steps": 10_000,
            "optimizer": {"name": "adamw", "lr": 1e-4},
            **layout.training,
        },
        "data": {"kind": "synthetic"},
        "parallelism": {
            "tensor": 1,
            "pipeline": 1,
            "data": 1,
            "zero_stage": 0 if layout.training.get("precision") == "fp32" else 1,
            "micro_batch_size": layout.micro,
            "memory_headroom": 0.0,
            **parallelism,
        },
    }


def digest(layout: BenchCase, gpu: str) -> str:
    """Of what is run: a result of another recipe is made anew."""
    return hashlib.sha256(json.dumps(recipe(layout, gpu), sort_keys=True).encode()).hexdigest()[:16]


def gpu_called(device: str) -> str:
    """The catalogue's name of what torch calls e.g. "NVIDIA H200". Raises ValueError where it is
    none of them."""
    words = device.lower().replace("geforce", "").replace("-", " ").split()
    joined = {
        "".join(words[first:stop])
        for first in range(len(words))
        for stop in range(first + 1, len(words) + 1)
    }
    names = [name for name in catalogue()["gpus"] if name != "cpu"]
    found = [name for name in names if name.split("-")[0] in joined]
    boards = [name for name in found if {*name.split("-")[1:-1]} & {*words}]
    found = boards or without_pcie_boards(found)
    sizes = [name for name in found if any(size in device.lower() for size in name.split("-")[-1:])]
    if len(sizes or found) != 1:
        raise ValueError(
            f"{device!r} is no one GPU of the catalogue: name it with --gpu, one of "
            f"{', '.join(names)}"
        )
    return (sizes or found)[0]

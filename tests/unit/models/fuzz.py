"""Mutated config.json and safetensors files of a model's folder: what `check` and stage 2 make of
them is a model or a refusal, never a traceback, and never a wait."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardwright.cli.recipe_commands import findings
from shardwright.diagnostics import Refusal
from shardwright.diagnostics.diagnostic_rendering import render_diagnostics
from shardwright.models.graph_builder import build_model_graph
from shardwright.recipe.recipe_loader import load_recipe
from tests.unit.data.fuzz import mutated, scrambled, scrambled_bytes

SECONDS_AT_MOST = 20
CONFIGS: tuple[dict[str, Any], ...] = (
    {
        "model_type": "llama",
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "rope_theta": 1e4,
    },
    {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "head_dim": 16,
    },
    {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
    },
    {
        "model_type": "deepseek_v3",
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "n_routed_experts": 4,
        "first_k_dense_replace": 1,
    },
    {
        "model_type": "phi3",
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
    },
    {
        "model_type": "llama",
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    },
    {
        "model_type": "gpt2",
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "architectures": ["GPT2LMHeadModel"],
        "dtype": "bfloat16",
    },
)
_SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "eos_token_id": [2, 3],
    "pad_token_id": None,
}
RECIPE: dict[str, Any] = {
    "version": 1,
    "name": "fuzz",
    "cluster": {"nodes": 1, "gpus_per_node": 1, "gpu": "cpu"},
    "training": {"sequence_length": 32, "global_batch_size": 2, "steps": 2, "precision": "fp32"},
    "data": {"kind": "synthetic"},
}


def read_folder(folder: Path, what: object, *, weights: str, traces: bool = True) -> str:
    """ "ok", or the first code. what: told with a failure."""
    recipe = folder / "recipe.json"
    recipe.write_text(json.dumps({**RECIPE, "model": {"source": str(folder), "weights": weights}}))
    try:
        with _at_most(SECONDS_AT_MOST):
            loaded = load_recipe(recipe)
            told = findings(loaded)
            render_diagnostics(told, loaded.source, color=False).encode("utf-8", "backslashreplace")
            if errors := [d for d in told if d.severity == "error"]:
                return errors[0].code
            if traces:
                build_model_graph(loaded.model)
            return "ok"
    except Refusal as refusal:
        render_diagnostics(refusal.diagnostics, refusal.source, color=False).encode(
            "utf-8", "backslashreplace"
        )
        return refusal.diagnostics[0].code
    except BaseException as error:
        error.add_note(f"of {what!r}"[:2000])
        raise


@contextlib.contextmanager
def _at_most(seconds: int) -> Iterator[None]:
    def late(signum: int, frame: object) -> None:
        raise AssertionError(f"it takes more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def fuzz_model_configs(count: int, seed: int, folder: Path) -> dict[str, int]:
    rng = random.Random(seed)
    kinds: dict[str, int] = {}
    for _ in range(count):
        config = {**_SIZES, **rng.choice(CONFIGS)}
        text = (
            scrambled(rng, json.dumps(config))
            if rng.random() < 0.2
            else json.dumps(mutated(rng, config))
        )
        (folder / "config.json").write_text(text, encoding="utf-8", errors="surrogatepass")
        ending = read_folder(folder, text, weights="random")
        kinds[ending] = kinds.get(ending, 0) + 1
    return {"mutations": count, **kinds}


def fuzz_weight_files(count: int, seed: int, folder: Path) -> dict[str, int]:
    """The header of a safetensors file, its length, the bytes behind it, and the index of several
    files."""
    import numpy as np
    from safetensors.numpy import save

    rng = random.Random(seed)
    kinds: dict[str, int] = {}
    (folder / "config.json").write_text(json.dumps({**_SIZES, **CONFIGS[0]}))
    tensors = {
        f"model.layers.{n}.mlp.up_proj.weight": np.ones((96, 64), np.float32) for n in range(2)
    }
    whole = save({**tensors, "model.norm.weight": np.ones(64, np.float32)}, {"format": "pt"})
    size = struct.unpack("<Q", whole[:8])[0]
    header, body = json.loads(whole[8 : 8 + size]), whole[8 + size :]
    weights, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    for _ in range(count):
        index.unlink(missing_ok=True)
        kind = rng.choice(("header", "header", "text", "length", "bytes", "index"))
        if kind == "header":
            text = json.dumps(mutated(rng, header)).encode("utf-8", "surrogatepass")
            data = struct.pack("<Q", len(text)) + text + body
        elif kind == "text":
            text = scrambled(rng, json.dumps(header)).encode("utf-8", "surrogatepass")
            data = struct.pack("<Q", len(text)) + text + body
        elif kind == "length":
            data = (
                struct.pack(
                    "<Q", rng.choice((0, 1, 7, size - 1, size + 1, 2**31, 2**63, 2**64 - 1))
                )
                + whole[8:]
            )
        elif kind == "bytes":
            data = scrambled_bytes(rng, whole)
        else:
            data = whole
            document = mutated(
                rng,
                {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(header, weights.name)},
            )
            index.write_text(json.dumps(document), errors="surrogatepass")
            weights.unlink(missing_ok=True)
        if kind != "index":
            weights.write_bytes(data)
        ending = read_folder(folder, (kind, data[:1500]), weights="pretrained", traces=False)
        kinds[ending] = kinds.get(ending, 0) + 1
    return {"mutations": count, **kinds}

"""Losses of a small Llama in low precision and in bf16, by this GPU's kernels, on the Python
standard library's sources."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from shardwright.calibrate.layout_trials import launch
from shardwright.compile.compiled_folder import write_folder
from shardwright.compile.recipe_compiler import compile_recipe
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.utils.json_lines import read_json_lines

FORMATS = ("none", "fp8_tensorwise", "fp8_rowwise")
STEPS, TINY_STEPS, EVERY = 80, 10, 10
SECONDS = 240
_LLAMA = {"model_type": "llama", "vocab_size": 256, "max_position_embeddings": 1024}
_SIZE = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
_TINY_SIZE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def losses(low_precision: str, gpu: str) -> dict[str, Any]:
    """Return every tenth step's loss and the last, by step, or `why` there are none.

    gpu: a name of the catalogue; on "cpu" the model is tiny, and rounding is emulated
    """
    with tempfile.TemporaryDirectory(prefix="shardwright-bench-gpu-") as name:
        recipe, out = Path(name, "recipe.yaml"), Path(name, "out")
        recipe.write_text(json.dumps(_recipe(low_precision, gpu)), encoding="utf-8")
        write_folder(out, compile_recipe(load_recipe(recipe)).files)
        _, _, why = launch(out, TINY_STEPS if gpu == "cpu" else STEPS, SECONDS)
        if why:
            return {"why": why}
        lines = list(read_json_lines(out / "run" / "metrics.jsonl"))
    found = {int(line["step"]): float(line["loss"]) for line in lines}
    last = max(found)
    return {str(step): loss for step, loss in found.items() if step % EVERY == 1 or step == last}


def _recipe(low_precision: str, gpu: str) -> dict[str, Any]:
    is_tiny = gpu == "cpu"
    return {
        "version": 1,
        "name": "low-precision-losses",
        "model": {"config": _LLAMA | (_TINY_SIZE if is_tiny else _SIZE), "weights": "random"},
        "cluster": {"nodes": 1, "gpus_per_node": 1, "gpu": gpu},
        "training": {
            "sequence_length": 32 if is_tiny else 1024,
            "global_batch_size": 16,
            "steps": TINY_STEPS if is_tiny else STEPS,
            "precision": "bf16",
            "low_precision": low_precision,
            "optimizer": {"name": "adamw", "lr": 3e-4},
            "seed": 7,
        },
        "data": {"kind": "text", "path": "python-stdlib", "tokenizer": "byte"}
        | {"packing": False, "shuffle": True},
        "parallelism": {
            "tensor": 1,
            "pipeline": 1,
            "data": 1,
            "zero_stage": 1,
            "micro_batch_size": 8,
            "activation_checkpointing": "none",
        },
    }

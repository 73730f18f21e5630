"""Compiled folders to report on, made in this process: torch is imported once."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

from shardwright.compile.compiled_folder import write_folder
from shardwright.compile.recipe_compiler import compile_recipe
from shardwright.recipe.recipe_loader import load_recipe
from tests.conftest import SMALL_RECIPE

LLAMA_405B = {
    "model_type": "llama",
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
LARGEST: dict[str, Any] = {
    "version": 1,
    "name": "llama-405b-2048x8h100",
    "model": {"config": LLAMA_405B, "weights": "random"},
    "cluster": {
        "nodes": 2048,
        "gpus_per_node": 8,
        "gpu": "h100-sxm-80gb",
        "price_per_gpu_hour": 2.5,
    },
    "training": {
        "sequence_length": 8192,
        "global_batch_size": 2048,
        "tokens": 15.6e12,
        "precision": "bf16",
    },
    "data": {"kind": "synthetic"},
    "parallelism": {"tensor": 8, "pipeline": 16},
}


def compiled(document: dict[str, Any], folder: Path) -> Path:
    """folder/out, from a recipe beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "recipe.json"
    path.write_text(json.dumps(document))
    found = compile_recipe(load_recipe(path))
    write_folder(folder / "out", found.files)
    for k, files in enumerate(found.islands):
        write_folder(folder / "out" / f"island-{k}", files)
    return folder / "out"


def with_validation(folder: Path, steps: tuple[int, ...]) -> Path:
    """Beside what with_run leaves."""
    lines = [
        {
            "step": k,
            "loss": 3 - k / 40,
            "perplexity": math.exp(3 - k / 40),
            "tokens": 9,
            "seconds": 1.0,
            "attempt": 1,
        }
        for k in steps
    ]
    (folder / "run" / "evaluation.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )
    return folder


def two_islands(document: dict[str, Any]) -> dict[str, Any]:
    """The recipe, of two islands of its size."""
    cluster, training = document["cluster"], document["training"]
    cluster = {
        **cluster,
        "nodes": 2 * cluster["nodes"],
        "islands": 2,
        "inter_island_gbits_per_second": 0.05,
    }
    outer = {"every_steps": 10}
    training = {**training, "global_batch_size": 2 * training["global_batch_size"], "outer": outer}
    return {**document, "cluster": cluster, "training": training}


def with_islands_run(folder: Path, steps: int = 60) -> Path:
    """Write the files of a run of two islands, of which the second died after step 45."""
    for k, done in ((0, steps), (1, 45)):
        own = with_run(folder / f"island-{k}", done, cause="killed (signal 9)" if k else "")
        waits = [
            {"step": s, "members": [0, 1] if s < 50 else [0], "seconds": 0.2}
            for s in range(10, done + 1, 10)
        ]
        (own / "run" / "outer.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in waits) + '{"st'
        )
    rounds = [
        {"step": s, "members": [0, 1] if s < 50 else [0], "joined": [], "seconds": 0.2}
        for s in range(10, steps + 1, 10)
    ]
    (folder / "run").mkdir(exist_ok=True)
    (folder / "run" / "rounds.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in rounds)
    )
    return folder


def with_run(folder: Path, steps: int, cause: str = "") -> Path:
    """Write the files of a run, a half-written last line included."""
    (folder / "run").mkdir(exist_ok=True)
    lines = [
        {
            "step": k,
            "loss": 2 + 3 * math.exp(-k / 40),
            "grad_norm": 1.0,
            "learning_rate": 1e-3,
            "tokens": 256,
            "step_seconds": 0.05 + 0.2 * (k == 1),
            "tokens_per_second": 5120.0,
            "attempt": 1,
        }
        for k in range(1, steps + 1)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "run" / "metrics.jsonl").write_text(text + '{"step": 99')
    (folder / "run" / "status.json").write_text(
        json.dumps({"status": "failed" if cause else "done", "cause": cause})
    )
    (folder / "run" / "summary.json").write_text(
        json.dumps({"measured": {"peak_bytes": 3 * 2**30, "mfu": None}})
    )
    return folder


def small_mixture() -> dict[str, Any]:
    """Four experts a layer over two expert ranks, under two pipeline ranks."""
    document = small_with({"pipeline": 2, "data": 2, "expert": 2, "micro_batch_size": 2})
    document["model"]["config"] |= {
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    }
    return document


def small_with(parallelism: dict[str, Any], **training: Any) -> dict[str, Any]:
    document = copy.deepcopy(SMALL_RECIPE)
    document["parallelism"] = parallelism
    document["training"] |= training
    return document

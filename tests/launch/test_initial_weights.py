"""Initial weights: each rank reads its own slices and never holds the whole model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config

from tests.launch.resume_matrix import ROOT
from tests.parity.harness import metrics, must, shardwright
from tests.unit.models.quantized_weights import quantise_fp8

MIB = 2**20
SLACK_BYTES = 8 * MIB
"""Modules and Python objects."""

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "vocab_size": 8001,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 65 M parameters in shards of 64 MB, compiled for pipeline 2 x tensor 2."""
    folder = tmp_path_factory.mktemp("large")
    config = dict(CONFIG)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(config.pop("model_type"), **config)
    )
    model.save_pretrained(folder / "weights", max_shard_size="64MB")
    assert len(list((folder / "weights").glob("*.safetensors"))) > 2
    document = {
        "version": 1,
        "name": "large",
        "model": {"source": "./weights"},
        "cluster": {"nodes": 1, "gpus_per_node": 4, "gpu": "cpu"},
        "training": {
            "sequence_length": 32,
            "global_batch_size": 4,
            "steps": 1,
            "precision": "fp32",
        },
        "data": {"kind": "synthetic"},
        "parallelism": {"tensor": 2, "pipeline": 2, "data": 1, "micro_batch_size": 1},
    }
    (folder / "recipe.json").write_text(json.dumps(document))
    must(shardwright("compile", folder / "recipe.json", "-o", folder / "out"))
    return folder / "out"


@pytest.mark.parametrize("rank", [0, pytest.param(3, marks=pytest.mark.prove)])
def test_a_rank_holds_its_shard_and_a_layer(out: Path, rank: int) -> None:
    """pipeline rank 0 and 1, tensor rank 0 and 1."""
    worker = Path(__file__).with_name("memory_worker.py")
    environment = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "compiler"))),
        # What is freed goes back at once: how much the allocator keeps differs from run to run by a
        # layer.
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
    }
    done = must(
        subprocess.run(
            [sys.executable, str(worker), str(out), str(rank)],
            capture_output=True,
            text=True,
            env=environment,
        )
    )
    found = json.loads(done.stdout.splitlines()[-1])
    plan = json.loads((out / "plan.json").read_text())
    splits = [p for m in plan["tensor_parallel"]["modules"] for p in m["parameters"]]
    elements = {p["name"]: 1 for p in splits}
    for p in splits:
        for n in p["shape"]:
            elements[p["name"]] *= n
    whole = 4 * sum(elements.values())
    layer = 4 * sum(n for name, n in elements.items() if name.startswith("model.layers.0."))
    largest = max(layer, 4 * max(elements.values()))
    assert found["held"] < 0.3 * whole
    assert found["read"] == found["held"]  # its own slices, each once
    assert found["peak"] <= found["held"] + largest + SLACK_BYTES, (found, largest)


@pytest.mark.launch
@pytest.mark.parametrize(
    "kind", ["a head of its own", pytest.param("fp8", marks=pytest.mark.prove)]
)
def test_a_run_starts_from_the_model_that_transformers_loads(kind: str, tmp_path: Path) -> None:
    """The first loss and the number of parameters are from_pretrained's, of the same folder."""
    config = {
        **CONFIG,
        "hidden_size": 96,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "vocab_size": 257,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    model.save_pretrained(tmp_path / "weights")
    quantisation = None
    if kind == "fp8":
        quantise_fp8(tmp_path / "weights")
        quantisation = FineGrainedFP8Config(dequantize=True, weight_block_size=(16, 16))
    else:
        path = tmp_path / "weights" / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "tie_word_embeddings": True}))
    tokens = np.random.default_rng(7).integers(0, 257, (2, 33), dtype=np.int32)
    np.save(tmp_path / "tokens.npy", tokens)
    document = {
        "version": 1,
        "name": "start",
        "model": {"source": "./weights"},
        "cluster": {"nodes": 1, "gpus_per_node": 2, "gpu": "cpu"},
        "training": {
            "sequence_length": 33,
            "global_batch_size": 2,
            "steps": 1,
            "precision": "fp32",
        },
        "data": {"kind": "tokens", "path": "tokens.npy", "shuffle": False, "packing": False},
        "parallelism": {"tensor": 2, "pipeline": 1, "data": 1, "micro_batch_size": 1},
    }
    (tmp_path / "recipe.json").write_text(json.dumps(document))
    out = tmp_path / "out"
    told = must(shardwright("compile", tmp_path / "recipe.json", "-o", out))
    assert ("note[SW2025]" if kind == "fp8" else "warning[SW2026]") in told.stderr
    plain = AutoModelForCausalLM.from_pretrained(
        tmp_path / "weights", dtype=torch.float32, quantization_config=quantisation
    )
    count = json.loads((out / "plan.json").read_text())["model"]["total_parameters"]
    assert count == sum(parameter.numel() for parameter in plain.parameters())
    must(shardwright("run", out))
    ids = torch.from_numpy(tokens.astype(np.int64))
    with torch.no_grad():
        wanted = float(plain(input_ids=ids, labels=ids).loss)
    assert abs(metrics(out)[0]["loss"] - wanted) < 1e-5

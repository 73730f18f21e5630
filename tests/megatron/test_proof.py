"""What a compile proves: the right model passes, each wrong one is told by its difference, at any number of ranks."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwright.compile import compile_recipe
from shardwright.engines.megatron import proof
from shardwright.plan.serialize import plan_to_json
from shardwright.recipe.load import load_recipe
from tests.conftest import SMALL_RECIPE

pytestmark = [
    pytest.mark.launch,
    pytest.mark.skipif(not importlib.util.find_spec("megatron"), reason="megatron-core is not installed"),
]
LLAMA: dict[str, Any] = SMALL_RECIPE["model"]["config"]
ROPE = {"rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {**ROPE, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 2.0}  # not those of Llama 3.1
NUMBERS: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "llama": ("", LLAMA, {}),
    "rope of other factors": ("", {**LLAMA, "rope_parameters": LLAMA3}, {}),
    "sliding windows": ("", {**LLAMA, "model_type": "mistral", "sliding_window": 8}, {}),
    "gemma": ("", {**LLAMA, "model_type": "gemma", "head_dim": 16}, {}),
    "qwen3": ("", {**LLAMA, "model_type": "qwen3", "head_dim": 16}, {}),
    "swapped": ("swapped keys and values", LLAMA, {"apart": "logits differ"}),
    "a bias": ("", {**LLAMA, "attention_bias": True}, {"unsupported": "attention_bias"}),
    "an unknown type": ("", {**LLAMA, "model_type": "olmo2"}, {"unsupported": "olmo2"}),
    "a dynamic rope": (
        "",
        {**LLAMA, "rope_parameters": {**ROPE, "rope_type": "dynamic"}},
        {"unsupported": "rope_type dynamic"},
    ),
    "yarn": ("", {**LLAMA, "rope_parameters": {**ROPE, "rope_type": "yarn"}}, {"unsupported": "rope_type yarn"}),
}


def test_what_it_finds(write_recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "prove", lambda *asked: None)
    layout = {"tensor": 2, "pipeline": 2, "data": 128, "zero_stage": 1, "micro_batch_size": 1}
    changes = {"target": "megatron", "parallelism": {**layout, "sequence_parallel": True}}
    cluster = {"cluster": {"nodes": 64, "gpus_per_node": 8, "gpu": "h100-sxm-80gb"}}
    recipe = load_recipe(write_recipe({**changes, **cluster, "training.global_batch_size": 512}))
    plan = json.loads(plan_to_json(compile_recipe(recipe).plan))
    wrong = json.loads(json.dumps(plan))
    for rank in wrong["ranks"]:
        rank["parameter_bytes"] += 4
    questions = [[planted, config, None] for planted, config, _ in NUMBERS.values()]
    asked = [*questions, ["", LLAMA, plan], ["", LLAMA, wrong]]
    script = Path(__file__).with_name("proof_worker.py")
    done = subprocess.run(
        [sys.executable, script], input=json.dumps(asked), capture_output=True, text=True, timeout=600
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(asked), done.stderr[-3000:]
    for (name, (_, _, wanted)), found in zip(NUMBERS.items(), answers, strict=False):
        assert found.keys() == wanted.keys(), (name, found)
        assert all(text in found[key] for key, text in wanted.items()), (name, found)
    assert answers[-2] == {} and "bytes of parameters" in answers[-1]["layout"]

"""A student learns from a larger teacher, by the commands that docs/distillation.md names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.parity.harness import metrics, must, shardwright

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}
TEACHER = CONFIG | {
    "vocab_size": 260,
    "hidden_size": 48,
    "intermediate_size": 96,
    "initializer_range": 0.3,
}
STEPS = 40


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A teacher's folder, texts, and a recipe that names what the teacher will say of them."""
    torch.manual_seed(5)
    config = dict(TEACHER)
    made = AutoConfig.for_model(config.pop("model_type"), **config)
    AutoModelForCausalLM.from_config(made, dtype=torch.float32).save_pretrained(
        tmp_path / "teacher"
    )
    random, letters = np.random.default_rng(7), list("abcdefghij kl\n")
    lines = [
        json.dumps({"text": "".join(random.choice(letters, int(random.integers(3, 40))).tolist())})
        for _ in range(300)
    ]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines) + "\n")
    document = {
        "version": 1,
        "name": "student",
        "model": {"config": CONFIG, "weights": "random"},
        "cluster": {"nodes": 1, "gpus_per_node": 2, "gpu": "cpu"},
        "training": {
            "sequence_length": 32,
            "global_batch_size": 8,
            "steps": STEPS,
            "precision": "fp32",
            "objective": {"name": "distill", "teacher": "scores", "teacher_weight": 0.9},
            "optimizer": {"name": "adamw", "lr": 1e-2},
        },
        "data": {"kind": "jsonl", "path": "texts.jsonl", "tokenizer": "byte", "packing": True},
        "validation": {"fraction": 0.1, "every_steps": STEPS},
        "parallelism": {"pipeline": 2, "tensor": 1, "data": 1, "micro_batch_size": 2},
    }
    (tmp_path / "student.yaml").write_text(json.dumps(document))
    return tmp_path


@pytest.mark.launch
def test_a_student_learns_from_a_score_file(folder: Path) -> None:
    recipe, out = folder / "student.yaml", folder / "out"
    early = must(shardwright("compile", recipe, "-o", folder / "early"))
    assert "warning[SW1301]" in early.stderr and "--top" in early.stderr
    too_early = shardwright("run", folder / "early")
    assert too_early.returncode == 1 and "SW6276" in too_early.stderr
    scored = must(
        shardwright(
            *("score", recipe, "--weights", folder / "teacher", "--top", 16),
            *("-o", folder / "scores"),
        )
    )
    assert "held-out" in scored.stdout
    must(shardwright("compile", recipe, "-o", out))
    ran = must(shardwright("run", out))
    lines = metrics(out)
    assert len(lines) == STEPS
    for line in lines:
        wanted = 0.9 * line["kl"] + 0.1 * line["next_token_loss"]
        assert line["loss"] == pytest.approx(wanted, abs=1e-5)
    assert lines[-1]["kl"] < 0.7 * lines[0]["kl"], (lines[0], lines[-1])
    [held_out] = [
        json.loads(line) for line in (out / "run" / "evaluation.jsonl").read_text().splitlines()
    ]
    assert held_out["kl"] < 0.7 * lines[0]["kl"] and "perplexity" in ran.stdout
    assert held_out["perplexity"] == pytest.approx(np.exp(held_out["next_token_loss"]), rel=1e-6)

    # Other data than the teacher saw.
    texts = folder / "texts.jsonl"
    texts.write_text(texts.read_text().replace("a", "b", 1))
    must(shardwright("compile", recipe, "-o", folder / "other"))
    refused = shardwright("run", folder / "other")
    assert refused.returncode != 0
    assert "SW6271" in refused.stdout + refused.stderr
    assert "the data" in refused.stdout + refused.stderr
    assert not (folder / "other" / "run" / "metrics.jsonl").exists()

"""Megatron-Core's own layers of Transformer Engine, which a stand-in computes: their choice, the
names of their parameters, and Hugging Face's logits and gradients through Megatron's code. No GPU
has run the real ones for us."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwright.compile.recipe_compiler import compile_recipe
from shardwright.engines.megatron import megatron_equivalence
from shardwright.plan.plan import plan_to_json
from shardwright.recipe.recipe_loader import load_recipe
from tests.megatron.test_proof import NUMBERS

pytestmark = [
    pytest.mark.launch,
    pytest.mark.skipif(
        not importlib.util.find_spec("megatron"), reason="megatron-core is not installed"
    ),
]
PROVED = {
    name: config
    for name, (planted, config, wanted) in NUMBERS.items()
    if not planted and not wanted
}
del PROVED["gpt_oss"]  # keeps to this project's own
LINEARS = {"TELayerNormColumnParallelLinear", "TERowParallelLinear", "TEDotProductAttention"}
GROUPED = {"TEGroupedMLP", "TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear"}


def test_it_computes_what_hugging_face_does(
    write_recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(megatron_equivalence, "check_megatron_equivalence", lambda *asked: None)
    layout = {"tensor": 1, "pipeline": 1, "data": 1, "zero_stage": 0, "micro_batch_size": 1}
    cluster = {"nodes": 1, "gpus_per_node": 1, "gpu": "h100-sxm-80gb"}
    changes = {
        "target": "megatron",
        "parallelism": layout,
        "cluster": cluster,
        "training.precision": "bf16",
    }
    config = {key: value for key, value in PROVED["dots1"].items() if key != "head_dim"}
    plan = compile_recipe(load_recipe(write_recipe({**changes, "model.config": config}))).plan
    assert plan.model.transformer_engine == "auto"
    asked = {
        "configs": [*PROVED.values()],
        "config": config,
        "plan": json.loads(plan_to_json(plan)),
    }
    worker = Path(__file__).with_name("te_worker.py")
    done = subprocess.run(
        [sys.executable, worker],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=600,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(answers) == len(PROVED) + 1, done.stderr[-3000:]
    for (name, config), answer in zip(PROVED.items(), answers, strict=False):
        assert answer["found"] == {}, (name, answer)
        classes = set(answer["classes"])
        assert (
            classes & {"Norm", "Attention", "ColumnParallelLinear", "RowParallelLinear"} == set()
        ), (name, classes)
        assert classes >= LINEARS, (name, classes)
        assert (classes >= GROUPED) == any("experts" in key for key in config), (name, classes)
    _taken_on_a_gpu(answers[-1])


def _taken_on_a_gpu(answer: dict[str, Any]) -> None:
    assert answer["taken"] and answer["same"] and answer["fused in the last"] == []
    assert "Transformer Engine 2.9.0, not tested on GPUs" in answer["told"]
    assert answer["updates"] == [0, 2, 3]

"""What a plan with context ranks becomes: to DeepSpeed they are data ranks, and scripts of one's
own get no files."""

from __future__ import annotations

import json
from pathlib import Path

from shardwright.compile.recipe_compiler import CompileResult, compile_recipe
from shardwright.recipe.recipe_loader import load_recipe
from tests.unit.models.factory import SMALL_LLAMA


def compiled(folder: Path, **parallelism: int) -> CompileResult:
    folder.mkdir()
    document = {
        "version": 1,
        "name": "context",
        "model": {"config": SMALL_LLAMA, "weights": "random"},
        "cluster": {"nodes": 1, "gpus_per_node": 4, "gpu": "cpu"},
        "training": {
            "sequence_length": 64,
            "global_batch_size": 8,
            "steps": 4,
            "precision": "fp32",
        },
        "data": {"kind": "synthetic"},
        "parallelism": {
            "pipeline": 1,
            "tensor": 1,
            "zero_stage": 2,
            "micro_batch_size": 2,
            **parallelism,
        },
    }
    (folder / "recipe.yaml").write_text(json.dumps(document))
    return compile_recipe(load_recipe(folder / "recipe.yaml"))


def test_context_ranks_are_data_ranks_to_deepspeed(tmp_path: Path) -> None:
    cut, plain = compiled(tmp_path / "cut", context=2), compiled(tmp_path / "plain", context=1)
    assert [(r.data, r.context) for r in cut.plan.ranks] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    batches = [json.loads(c.files["ds_config.json"])["train_batch_size"] for c in (cut, plain)]
    assert batches == [16, 8]
    ranks = [json.loads(c.files["plan.json"])["ranks"][1] for c in (cut, plain)]
    assert [rank["context"] for rank in ranks] == [1, 0]
    beside = [{name for name in c.files if name.startswith("accelerate/")} for c in (cut, plain)]
    assert not beside[0] and len(beside[1]) == 3

"""ds_config.autotp.json in a plain user script: DeepSpeed cuts what the plan says, losses are the
plain run's."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig

from shardwright.compile.recipe_compiler import CompileResult, compile_recipe
from shardwright.engines.deepspeed.deepspeed_capabilities import AUTOTP_FILE
from shardwright.engines.deepspeed.deepspeed_files import AUTOTP_VERIFIED_TYPES
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.utils.numeric_difference import largest_difference, max_series_diff
from tests.parity.harness import LOSS_ABSOLUTE
from tests.parity.models import GPT2, LLAMA
from tests.worker_launch import launch_worker
from tests.zoo.configs import TEXT_VOCABULARY, tiny_config

pytestmark = pytest.mark.launch

SAMPLE: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "qwen3-tied": {**LLAMA, "model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "gpt_neox": tiny_config("gpt_neox"),  # query, key and value in one matrix, head by head
}


def compiled(config: dict[str, Any], folder: Path, zero_stage: int) -> CompileResult:
    """Into `folder` also what autotp_worker.py reads."""
    source = folder / "source"
    source.mkdir(parents=True)
    AutoConfig.for_model(**config).save_pretrained(source)
    recipe = {
        "version": 1,
        "name": "autotp",
        "model": {"source": "./source", "weights": "random"},
        "cluster": {"nodes": 1, "gpus_per_node": 2, "gpu": "cpu"},
        "training": {
            "sequence_length": 24,
            "global_batch_size": 8,
            "steps": 3,
            "precision": "fp32",
            "optimizer": {"name": "adamw", "lr": 1e-3, "eps": 1e-3, "weight_decay": 0.1},
            "gradient_clipping": 0.5,
        },
        "data": {"kind": "synthetic"},
        "parallelism": {"tensor": 2, "micro_batch_size": 4, "zero_stage": zero_stage},
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    result = compile_recipe(load_recipe(folder / "recipe.yaml"))
    if AUTOTP_FILE in result.files:
        (folder / "ds_config.json").write_bytes(result.files[AUTOTP_FILE])
        (folder / "config.json").write_bytes(result.files["model/config.json"])
        np.save(
            folder / "tokens.npy", np.random.default_rng(1).integers(3, TEXT_VOCABULARY, (24, 24))
        )
    return result


def launch(folder: Path, names: list[str]) -> None:
    done = launch_worker(
        Path(__file__).with_name("autotp_worker.py"),
        2,
        seconds=600,
        AUTOTP_CASES=os.pathsep.join(str(folder / name) for name in names),
    )
    written = [
        (folder / name / f"result-{rank}.json").exists() for name in names for rank in (0, 1)
    ]
    assert done.returncode == 0 and all(written), done.stdout[-3000:] + done.stderr[-3000:]


def measure(folder: Path, result: CompileResult) -> dict[str, float]:
    """Worst loss difference over both ranks, and the share of the layers' matrices that is cut.
    Shapes are checked."""
    plan = result.plan
    splits = {p.name: (m.style, p) for m in plan.tensor_parallel.modules for p in m.parameters}
    off, cut, total = [], 0, 0
    for rank in (0, 1):
        found = json.loads((folder / f"result-{rank}.json").read_text())
        assert "error" not in found, found["error"]
        off.append(max_series_diff(found["losses"], found["plain"]))
        for name, whole in found["whole"].items():
            style, split = splits[name]
            shape = found["shapes"][name]
            if not style.startswith("vocabulary"):
                assert shape == list(split.shard_shape(rank)), (name, style)
            if len(whole) == 2 and name.startswith(plan.model.cut.stack):
                total += int(np.prod(whole))
                cut += int(np.prod(whole)) if shape != whole else 0
    return {"loss": largest_difference(off), "sharded": cut / total}


@pytest.mark.parametrize("zero_stage", [1, pytest.param(3, marks=pytest.mark.prove)])
def test_a_users_own_script_trains_with_the_same_cut(zero_stage: int, tmp_path: Path) -> None:
    results = {
        name: compiled(config, tmp_path / name, zero_stage) for name, config in SAMPLE.items()
    }
    launch(tmp_path, list(results))
    for name, result in results.items():
        if zero_stage < 3:
            figures = measure(tmp_path / name, result)
            assert figures["loss"] <= LOSS_ABSOLUTE and figures["sharded"] == 1.0, (name, figures)
        else:  # ZeRO-3 keeps empty parameters between uses: losses tell
            for rank in (0, 1):
                found = json.loads((tmp_path / name / f"result-{rank}.json").read_text())
                assert max_series_diff(found["losses"], found["plain"]) <= LOSS_ABSOLUTE, (
                    name,
                    found,
                )


@pytest.mark.prove
def test_every_type(tmp_path: Path, proved: Callable[[str, str, dict[str, Any]], None]) -> None:
    results = {t: compiled(tiny_config(t), tmp_path / t, 1) for t in AUTOTP_VERIFIED_TYPES}
    launch(tmp_path, list(results))
    for t, result in results.items():
        figures = measure(tmp_path / t, result)
        proved(
            "zoo-autotp",
            t,
            {"verdict": "proved" if figures["loss"] <= LOSS_ABSOLUTE else "wrong", **figures},
        )
        assert figures["loss"] <= LOSS_ABSOLUTE and figures["sharded"] == 1.0, (t, figures)


def test_what_autotp_cannot_express_is_said(tmp_path: Path) -> None:
    for name, config, words in (
        ("gpt2", GPT2, "transformer.h.0.attn.c_attn is a Conv1D"),
        ("phi3", tiny_config("phi3"), "which AutoTP does not support"),
    ):
        result = compiled(config, tmp_path / name, 1)
        assert AUTOTP_FILE not in result.files
        (warning,) = [d for d in result.warnings if d.code == "SW4101"]
        assert warning.severity == "warning" and words in warning.message

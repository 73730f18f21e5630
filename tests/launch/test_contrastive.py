"""CLIP and SigLIP through `compile`, `run` and `export`: metrics as of one process, and AutoModel
loads the result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoProcessor

from shardwright.utils.numeric_difference import state_dict_max_abs_diff
from tests.figures import lines_apart
from tests.parity.contrastive import (
    BATCH,
    PairCase,
    recipe,
    reference,
    without_gradient,
    write_pairs,
)
from tests.parity.harness import (
    LOSS_ABSOLUTE,
    NORM_RELATIVE,
    WEIGHT_ABSOLUTE,
    metrics,
    must,
    newest_checkpoint,
    shardwright,
)

pytestmark = pytest.mark.launch


@pytest.mark.parametrize(
    "case",
    [
        PairCase("clip", zero_stage=2, steps=4),
        pytest.param(PairCase("siglip", zero_stage=3, steps=4), marks=pytest.mark.prove),
    ],
)
def test_trains_and_exports(case: PairCase, tmp_path: Path) -> None:
    write_pairs(tmp_path)
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe(case)), encoding="utf-8")
    out = tmp_path / "out"
    must(shardwright("compile", tmp_path / "recipe.yaml", "-o", out))
    must(shardwright("run", out))
    lines = metrics(out)
    wanted = reference(case.model, tmp_path, out / "tokenizer", case.steps)
    apart = lines_apart(lines, wanted)
    assert apart["loss"] <= LOSS_ABSOLUTE and apart["norm"] <= NORM_RELATIVE, apart
    assert all(
        line["pairs_per_second"] == pytest.approx(BATCH / line["step_seconds"]) for line in lines
    )
    step = newest_checkpoint(out)
    must(shardwright("export", step, "-o", tmp_path / "hf"))
    trained = AutoModel.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    named = {name: p for name, p in trained.named_parameters() if not without_gradient(name)}
    kept = {name: wanted.weights[name] for name in named}
    assert named.keys() == {name for name in wanted.weights if not without_gradient(name)}
    assert all(p.shape == kept[name].shape for name, p in named.items())
    assert state_dict_max_abs_diff(named, kept) <= WEIGHT_ABSOLUTE
    AutoProcessor.from_pretrained(tmp_path / "hf", local_files_only=True)
    for folder in (step, tmp_path / "hf"):
        refused = shardwright("generate", folder, "--prompt", "a")
        assert refused.returncode == 1 and "SW6402" in refused.stderr, refused.stderr

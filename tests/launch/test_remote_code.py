"""A model that runs on Python code of its own trains in a pipeline, from the compiled folder's copy
of that code."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from shardwright.plan.plan import read_plan
from tests.parity.harness import (
    LENGTH,
    LOSS_ABSOLUTE,
    NORM_RELATIVE,
    SEED,
    STEPS,
    WEIGHT_ABSOLUTE,
    Case,
    difference_of,
    metrics,
    must,
    newest_checkpoint,
    recipe,
    shardwright,
    train_in_one_process,
)
from tests.parity.reference import token_rows
from tests.unit.models.own_model import FILES, write_own_model

pytestmark = pytest.mark.launch


def test_own_code_trains_in_a_pipeline_as_one_plain_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    case = Case(model="llama", pipeline=2, pretrained=True)
    source = write_own_model(tmp_path / "weights")
    torch.manual_seed(SEED)
    plain = AutoModelForCausalLM.from_config(
        _trusted_config(source), dtype=torch.float32, trust_remote_code=True
    )
    plain.save_pretrained(source)
    assert {*FILES, "model.safetensors"} <= {p.name for p in source.iterdir()}
    tokens = np.random.default_rng(SEED).integers(
        0, 257, (STEPS * case.batch, LENGTH), dtype=np.int32
    )
    np.save(tmp_path / "tokens.npy", tokens)
    document = recipe(case, tmp_path)
    document["model"]["trust_remote_code"] = document["model"]["source"]
    (tmp_path / "recipe.yaml").write_text(json.dumps(document))

    told = must(shardwright("compile", tmp_path / "recipe.yaml", "-o", tmp_path / "out")).stdout
    assert "parameters, weights pretrained\n" in told
    for name in FILES:
        (source / name).unlink()  # the compiled folder has its own
    assert "starts from weights pretrained\n" in must(shardwright("run", tmp_path / "out")).stdout
    step, code = newest_checkpoint(tmp_path / "out"), read_plan(tmp_path / "out").model.remote_code
    assert code is not None
    must(shardwright("export", step, "-o", tmp_path / "hf", "--trust-code", code.fingerprint))

    exported = AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.float32, trust_remote_code=True
    )
    wanted = train_in_one_process(
        plain,
        [token_rows(tokens, k, case.batch) for k in range(1, STEPS + 1)],
        case.clipping,
    )
    difference = difference_of(metrics(tmp_path / "out"), dict(exported.named_parameters()), wanted)
    assert difference.loss_absolute <= LOSS_ABSOLUTE, difference
    assert difference.norm_relative <= NORM_RELATIVE, difference
    assert difference.weight_absolute <= WEIGHT_ABSOLUTE, difference


def _trusted_config(folder: Path) -> object:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder, trust_remote_code=True)

"""The estimate of a step of DPO beside that of fine-tuning with as many tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.launch.test_overhead import CASES, LENGTH, MODEL
from tests.parity.harness import Case, must, recipe, shardwright

LIMIT = 1.03
STEPS = 14
DPO = {"name": "dpo", "beta": 0.1}


def write_recipe(case: Case, folder: Path, objective: dict[str, Any] | None) -> Path:
    """Pairs of texts as long as a sequence, or random tokens of twice as many sequences."""
    folder.mkdir()
    sequences = case.micro if objective else 2 * case.micro
    document = recipe(replace(case, micro=sequences), folder) | {"data": {"kind": "synthetic"}}
    document["model"] = {"config": MODEL, "weights": "random"}
    document["training"] |= {"sequence_length": LENGTH, "steps": STEPS}
    if objective is not None:
        random, letters = np.random.default_rng(3), list("abcdefghijklmno ")
        prompt, *texts = (
            "".join(random.choice(letters, size).tolist()) for size in (LENGTH // 4, LENGTH, LENGTH)
        )
        pair = json.dumps({"prompt": prompt, "chosen": texts[0], "rejected": texts[1]})
        (folder / "pairs.jsonl").write_text((pair + "\n") * STEPS * case.batch)
        document["data"] = {"kind": "preference", "path": "pairs.jsonl", "tokenizer": "byte"}
        document["training"]["objective"] = objective
    (folder / "recipe.yaml").write_text(json.dumps(document))
    return folder / "recipe.yaml"


def estimate(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(must(shardwright("estimate", path, "--json")).stdout)
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_preference_is_predicted_to_cost_its_tokens(name: str, tmp_path: Path) -> None:
    plain = estimate(write_recipe(CASES[name], tmp_path / "plain", None))
    pairs = estimate(write_recipe(CASES[name], tmp_path / "pairs", DPO))
    seconds = [each["time"]["step_seconds"] for each in (pairs, plain)]
    memory = [each["memory"]["peak_bytes"] for each in (pairs, plain)]
    assert 1 / LIMIT <= seconds[0] / seconds[1] <= LIMIT
    assert 1 / LIMIT <= memory[0] / memory[1] <= LIMIT

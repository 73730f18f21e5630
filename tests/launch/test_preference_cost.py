"""Time a step of DPO beside a step of fine-tuning with as many tokens: same model and layout, runs
by turns."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.launch.test_overhead import CASES, LENGTH, MODEL
from tests.parity.harness import Case, metrics, must, recipe, shardwright

LIMIT = 1.03
STEPS, WARM_UP, ROUNDS = 12, 4, 2
DPO = {"name": "dpo", "beta": 0.1}


def write_recipe(case: Case, folder: Path, objective: dict[str, Any] | None) -> Path:
    """Pairs of texts as long as a sequence, or random tokens of twice as many sequences."""
    folder.mkdir()
    is_paired = objective is not None and objective["name"] != "kto"
    sequences = case.micro if is_paired else 2 * case.micro
    document = recipe(replace(case, micro=sequences), folder) | {"data": {"kind": "synthetic"}}
    document["model"] = {"config": MODEL, "weights": "random"}
    document["training"] |= {"sequence_length": LENGTH, "steps": STEPS}
    if objective is not None:
        random, letters = np.random.default_rng(3), list("abcdefghijklmno ")
        sizes = {"prompt": LENGTH // 4, "chosen": LENGTH, "rejected": LENGTH}
        pairs = [
            {name: "".join(random.choice(letters, size)) for name, size in sizes.items()}
            for _ in range(STEPS * case.batch)
        ]
        (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
        document["data"] = {"kind": "preference", "path": "pairs.jsonl", "tokenizer": "byte"}
        document["training"]["objective"] = objective
    (folder / "recipe.yaml").write_text(json.dumps(document))
    return folder / "recipe.yaml"


@pytest.mark.launch
@pytest.mark.prove
@pytest.mark.parametrize("name", CASES)
def test_a_preference_costs_its_tokens(
    name: str, tmp_path: Path, proved: Callable[[str, str, dict[str, Any]], None]
) -> None:
    seconds: dict[str, list[float]] = {"pairs": [], "plain": []}
    memory: dict[str, list[int]] = {"pairs": [], "plain": []}
    for number in range(ROUNDS):
        for kind, objective in (("plain", None), ("pairs", DPO)):
            folder = tmp_path / f"{kind}-{number}"
            path = write_recipe(CASES[name], folder, objective)
            must(shardwright("compile", path, "-o", folder / "out"))
            must(shardwright("run", folder / "out"))
            steps = [line["step_seconds"] for line in metrics(folder / "out")][WARM_UP:]
            seconds[kind].append(statistics.median(steps))
            summary = json.loads((folder / "out" / "run" / "summary.json").read_text())
            memory[kind].append(summary["measured"]["peak_bytes"])
    time_ratio, memory_ratio = (min(x["pairs"]) / min(x["plain"]) for x in (seconds, memory))
    figures = {
        "time_ratio": round(time_ratio, 4),
        "memory_ratio": round(memory_ratio, 4),
        "pairs_seconds": [round(each, 4) for each in seconds["pairs"]],
        "plain_seconds": [round(each, 4) for each in seconds["plain"]],
    }
    proved("preference-cost", name, figures)
    assert max(time_ratio, memory_ratio) <= LIMIT, figures

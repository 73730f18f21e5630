"""A step of ours beside a step of a hand-written plain DeepSpeed script: same model, layout and
batch, by turns in one run."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.parity.harness import Case, must, recipe, shardwright
from tests.parity.models import LLAMA

pytestmark = [pytest.mark.launch, pytest.mark.prove]
ROOT = Path(__file__).resolve().parents[2]
MODEL = {
    **LLAMA,
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 4,
    "vocab_size": 2048,
    "max_position_embeddings": 256,
}
CASES = {
    "zero3-dp2": Case(model="llama", data=2, zero_stage=3, micro=2, accumulation=2, clipping=1.0),
    "pp2": Case(model="llama", pipeline=2, micro=2, accumulation=8, clipping=1.0),
}
STEPS, WARM_UP, LENGTH = 30, 5, 256
LIMIT = 1.02


@pytest.mark.parametrize("name", CASES)
def test_a_step_costs_no_more_than_a_plain_scripts(
    name: str, tmp_path: Path, proved: Callable[[str, str, dict[str, Any]], None]
) -> None:
    document = recipe(CASES[name], tmp_path) | {"data": {"kind": "synthetic"}}
    document["model"] = {"config": MODEL, "weights": "random"}
    document["training"] |= {"sequence_length": LENGTH, "steps": STEPS}
    document["launch"] = {"env": {"PYTHONPATH": str(ROOT), "PLAIN_MODEL": json.dumps(MODEL)}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(document))
    out = tmp_path / "out"
    must(shardwright("compile", tmp_path / "recipe.yaml", "-o", out))
    (out / "train.py").write_text(
        "from tests.launch.overhead_worker import main\nraise SystemExit(main())\n"
    )
    must(shardwright("run", out))

    seconds = json.loads((out / "run" / "overhead-0.json").read_text())
    pairs = list(zip(seconds["ours"], seconds["plain"], strict=False))[WARM_UP:]
    ratio = statistics.median(ours / plain for ours, plain in pairs)
    figures = {
        "pairs": len(pairs),
        "median_ratio": round(ratio, 4),
        "ours_median_seconds": round(statistics.median(ours for ours, _ in pairs), 4),
        "plain_median_seconds": round(statistics.median(plain for _, plain in pairs), 4),
    }
    proved("overhead", name, figures)
    assert len(pairs) >= STEPS - WARM_UP - 1
    assert ratio <= LIMIT, figures

"""The estimate of a step of DPO beside that of fine-tuning with as many tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launch.test_overhead import CASES
from tests.launch.test_preference_cost import DPO, LIMIT, write_recipe
from tests.parity.harness import must, shardwright


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

"""Layouts that were not compared over islands."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from shardwright.compile.recipe_compiler import estimate_recipe
from shardwright.layout.layout import Candidate
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.search.runnable_recipes import diloco_layout_verified
from shardwright.utils.json_values import copy_shared_fields
from tests.unit.models.factory import SMALL_LLAMA


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"context": 2}, "context"),
        ({"expert": 2, "zero_stage": 0}, "expert"),
        ({"offload": "optimizer"}, "offload"),
        ({"schedule": "dualpipev"}, "schedule"),
        ({"tensor": 2, "pipeline": 2, "data": 1}, None),
        ({"expert": 2, "zero_stage": 1}, None),
        ({}, None),
    ],
)
def test_what_was_not_compared(tmp_path: Path, change: dict[str, Any], key: str | None) -> None:
    cluster = {"nodes": 2, "gpus_per_node": 2, "gpu": "h100-sxm-80gb"}
    document = {
        "version": 1,
        "name": "islands",
        "model": {"config": SMALL_LLAMA, "weights": "random"},
        "cluster": {**cluster, "islands": 2, "inter_island_gbits_per_second": 1},
        "training": {"sequence_length": 128, "global_batch_size": 8, "steps": 100},
    }
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(document))
    problem, estimate = estimate_recipe(load_recipe(path))
    strategy = dataclasses.replace(estimate.strategy, **change)
    found = diloco_layout_verified(copy_shared_fields(Candidate, problem, strategy=strategy))
    assert (None if found is None else found.code) == (None if key is None else "SW3173")
    if found is not None:
        assert found.key == ("parallelism", key)
        alone = dataclasses.replace(problem.recipe.cluster, islands=1)
        plain = dataclasses.replace(
            problem, recipe=dataclasses.replace(problem.recipe, cluster=alone)
        )
        assert (
            diloco_layout_verified(copy_shared_fields(Candidate, plain, strategy=strategy)) is None
        )

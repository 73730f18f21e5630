"""Islands in a recipe: one island's part, and what the keys must be to each other."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from shardwright.diagnostics import Refusal
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.recipe.recipe_types import Recipe
from shardwright.search.runnable_recipes import check_runnable
from tests.unit.models.factory import SMALL_LLAMA

CLUSTER = {
    "nodes": 4,
    "gpus_per_node": 8,
    "gpu": "h100-sxm-80gb",
    "islands": 2,
    "inter_island_gbits_per_second": 10,
}


def recipe(tmp_path: Path, **changes: Mapping[str, Any]) -> Recipe:
    """changes: sections of the recipe, merged key by key; None takes a key away."""
    document: dict[str, Any] = {
        "version": 1,
        "name": "islands",
        "model": {"config": SMALL_LLAMA, "weights": "random"},
        "cluster": CLUSTER,
        "training": {"sequence_length": 128, "global_batch_size": 64, "steps": 1000},
        "data": {"kind": "synthetic"},
    }
    for section, keys in changes.items():
        merged = {**document.get(section, {}), **keys}
        document[section] = {key: value for key, value in merged.items() if value is not None}
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(document))
    return load_recipe(path)


def refused(tmp_path: Path, **changes: Mapping[str, Any]) -> dict[str, str]:
    """Code -> key."""
    with pytest.raises(Refusal) as told:
        recipe(tmp_path, **changes)
    return {d.code: ".".join(map(str, d.key or ())) for d in told.value.diagnostics}


def test_the_recipe_is_one_islands(tmp_path: Path) -> None:
    found = recipe(tmp_path)
    assert (found.cluster.islands, found.cluster.nodes, found.training.global_batch_size) == (
        2,
        2,
        32,
    )
    assert found.training.outer is not None and dataclasses.asdict(found.training.outer) == {
        "every_steps": 100,
        "optimizer": "average",
        "lr": None,
        "momentum": None,
        "precision": "bf16",
        "overlap_steps": 0,
        "deadline_seconds": 600.0,
        "mixing": None,
    }
    # What the compiled folder keeps is the recipe of all, which is read back as one island's again.
    cluster: Any = found.document["cluster"]
    training: Any = found.document["training"]
    assert cluster["nodes"] == 4 and training["global_batch_size"] == 64
    again = tmp_path / "again.json"
    again.write_text(json.dumps(found.document))
    same = load_recipe(again)
    assert (same.cluster, same.training, same.document) == (
        found.cluster,
        found.training,
        found.document,
    )


def test_overlap_has_a_mixing(tmp_path: Path) -> None:
    for said, mixing in ((None, 0.5), (0.25, 0.25)):
        found = recipe(tmp_path, training={"outer": {"overlap_steps": 99, "mixing": said}})
        assert found.training.outer is not None and found.training.outer.mixing == mixing
        assert not [d for d in check_runnable(found) if d.code == "SW1924"]


def test_tokens_are_those_of_all_islands(tmp_path: Path) -> None:
    whole = recipe(tmp_path, training={"steps": None, "tokens": 128 * 64 * 1000 + 1})
    assert whole.training.step_count_or_zero == 1001


def test_one_island_is_no_island(tmp_path: Path) -> None:
    plain = recipe(tmp_path, cluster={"islands": None, "inter_island_gbits_per_second": None})
    said = recipe(tmp_path, cluster={"islands": 1, "inter_island_gbits_per_second": None})
    assert (
        plain.document == said.document and said.training.outer is None and said.cluster.nodes == 4
    )
    assert said.document["cluster"]["islands"] == 1  # type: ignore[index,call-overload]


@pytest.mark.parametrize(
    ("changes", "code", "key"),
    [
        ({"cluster": {"nodes": 3}}, "SW1231", "cluster.nodes"),
        ({"training": {"global_batch_size": 63}}, "SW1231", "training.global_batch_size"),
        ({"cluster": {"inter_island_gbits_per_second": None}}, "SW1232", "cluster.islands"),
        (
            {"cluster": {"nodes": "auto"}, "training": {"days_at_most": 3}},
            "SW1232",
            "cluster.nodes",
        ),
        ({"cluster": {"islands": 1}}, "SW1232", "cluster.inter_island_gbits_per_second"),
        (
            {
                "cluster": {"islands": None, "inter_island_gbits_per_second": None},
                "training": {"outer": {"lr": 0.7}},
            },
            "SW1232",
            "training.outer",
        ),
        ({"checkpoint": {"every_steps": 150}}, "SW1233", "checkpoint.every_steps"),
        ({"validation": {"fraction": 0.1, "every_steps": 50}}, "SW1233", "validation.every_steps"),
        (
            {"training": {"outer": {"optimizer": "nesterov", "lr": 0.6}}},
            "SW1235",
            "training.outer.optimizer",
        ),
        ({"training": {"outer": {"lr": 0.6}}}, "SW1235", "training.outer.lr"),
        ({"training": {"outer": {"every_steps": 0}}}, "SW1104", "training.outer.every_steps"),
        ({"training": {"outer": {"overlap_steps": 100}}}, "SW1235", "training.outer.overlap_steps"),
        ({"training": {"outer": {"mixing": 0.5}}}, "SW1235", "training.outer.mixing"),
        (
            {"training": {"outer": {"overlap_steps": 1, "mixing": 0}}},
            "SW1104",
            "training.outer.mixing",
        ),
        (
            {"training": {"outer": {"momentum": 1, "lr": 1, "optimizer": "nesterov"}}},
            "SW1104",
            "training.outer.momentum",
        ),
        ({"launch": {"outer_store": "no port"}}, "SW1106", "launch.outer_store"),
        # Degrees are those of an island: 16 GPUs, and half of the batch.
        ({"parallelism": {"tensor": 8, "pipeline": 2, "data": 2}}, "SW1203", "parallelism.tensor"),
        (
            {"parallelism": {"data": 2, "micro_batch_size": 32}},
            "SW1204",
            "training.global_batch_size",
        ),
    ],
)
def test_what_is_refused(tmp_path: Path, changes: dict[str, Any], code: str, key: str) -> None:
    assert refused(tmp_path, **changes) == {code: key}


def test_degrees_of_an_island_are_taken(tmp_path: Path) -> None:
    found = recipe(
        tmp_path, parallelism={"tensor": 8, "pipeline": 1, "data": 2, "micro_batch_size": 16}
    )
    assert found.parallelism.data == 2


def test_islands_freeze_parameters(tmp_path: Path) -> None:
    found = recipe(tmp_path, model={"freeze": ["model.norm.weight"]})
    assert found.model.freeze and not [d for d in check_runnable(found) if d.code == "SW1924"]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"training": {"precision": "fp16"}}, "training.precision"),
        ({"launch": {"hostfile": "hosts"}}, "launch.hostfile"),
        ({"lora": {"rank": 4}}, "lora"),
    ],
)
def test_what_can_be_estimated_and_not_compiled(
    tmp_path: Path, changes: dict[str, Any], key: str
) -> None:
    told = [d for d in check_runnable(recipe(tmp_path, **changes)) if d.code == "SW1924"]
    assert key in [".".join(map(str, d.key or ())) for d in told]

"""Keys of `training.optimizer` that one optimizer takes: defaults, refusals, and recipes without
them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwright.diagnostics import Refusal
from shardwright.engines.engine_table import DEFAULT_TARGET, ENGINES
from shardwright.layout.optimizers import OPTIMIZERS
from shardwright.recipe.optimizer_keys import OPTIMIZER_KEYS
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.recipe.recipe_schema import recipe_schema
from shardwright.recipe.recipe_types import Recipe
from tests.unit.recipe.test_bad_input import GOOD, changed


def loaded(folder: Path, optimizer: str | None) -> Recipe:
    text = (
        GOOD if optimizer is None else changed("steps: 20", f"steps: 20\n  optimizer: {optimizer}")
    )
    (folder / "recipe.yaml").write_text(text)
    return load_recipe(folder / "recipe.yaml")


def test_muon_has_defaults_of_its_own(tmp_path: Path) -> None:
    section = loaded(tmp_path, "{name: muon}").training.optimizer
    assert (section.lr, section.momentum, section.ns_steps) == (0.02, 0.95, 5)
    assert (section.adamw_lr, section.weight_decay) == (3e-4, 0.1)
    own = "{name: muon, lr: 1e-2, momentum: 0.9, ns_steps: 6, adamw_lr: 1e-4, betas: [0.9, 0.99]}"
    section = loaded(tmp_path, own).training.optimizer
    assert (section.lr, section.momentum, section.ns_steps) == (0.01, 0.9, 6)
    assert (section.adamw_lr, section.betas) == (1e-4, (0.9, 0.99))
    said = loaded(tmp_path, "{name: muon, momentum: null}").training.optimizer
    assert said.momentum == 0.95


@pytest.mark.parametrize("key", ["momentum", "ns_steps", "adamw_lr"])
@pytest.mark.parametrize("name", ["", "name: adamw, "])
def test_adamw_takes_none_of_them(key: str, name: str, tmp_path: Path) -> None:
    value = 5 if key == "ns_steps" else 0.5
    with pytest.raises(Refusal) as refused:
        loaded(tmp_path, f"{{{name}{key}: {value}}}")
    [diagnostic] = refused.value.diagnostics
    assert diagnostic.code == "SW1226" and diagnostic.key == ("training", "optimizer", key)
    assert refused.value.source is not None
    assert refused.value.source.locations[diagnostic.key].line == 13


def test_lion_has_defaults_of_its_own(tmp_path: Path) -> None:
    section = loaded(tmp_path, "{name: lion}").training.optimizer
    assert (section.lr, section.betas, section.weight_decay) == (1e-4, (0.9, 0.99), 0.1)
    own = loaded(tmp_path, "{name: lion, lr: 3e-5, betas: [0.95, 0.98]}").training.optimizer
    assert (own.lr, own.betas) == (3e-5, (0.95, 0.98))


def test_adafactor_has_defaults_of_its_own(tmp_path: Path) -> None:
    section = loaded(tmp_path, "{name: adafactor}").training.optimizer
    assert (section.lr, section.eps, section.scale_eps) == (1e-2, 1.1920929e-07, 1e-3)
    assert (section.beta2_decay, section.clip_threshold) == (-0.8, 1.0)
    assert section.scale_parameter is True
    own = loaded(tmp_path, "{name: adafactor, scale_parameter: false, clip_threshold: 2}")
    assert own.training.optimizer.scale_parameter is False
    assert own.training.optimizer.clip_threshold == 2


@pytest.mark.parametrize(
    ("optimizer", "key", "owners"),
    [
        ("{name: lion, eps: 1e-8}", "eps", "adamw"),
        ("{name: lion, momentum: 0.9}", "momentum", "muon"),
        ("{name: adafactor, betas: [0.9, 0.95]}", "betas", "adamw"),
        ("{name: adamw, scale_parameter: false}", "scale_parameter", "adafactor"),
        ("{clip_threshold: 1.5}", "clip_threshold", "adafactor"),
    ],
)
def test_a_key_of_other_optimizers_is_refused(
    optimizer: str, key: str, owners: str, tmp_path: Path
) -> None:
    with pytest.raises(Refusal) as refused:
        loaded(tmp_path, optimizer)
    [diagnostic] = refused.value.diagnostics
    assert diagnostic.code == "SW1226" and diagnostic.key == ("training", "optimizer", key)
    assert diagnostic.help is not None and owners in diagnostic.help
    assert refused.value.source is not None
    assert refused.value.source.locations[diagnostic.key].line == 13


@pytest.mark.parametrize("name", OPTIMIZER_KEYS)
def test_a_resolved_recipe_is_read_again(name: str, tmp_path: Path) -> None:
    """The compiled folder holds every key of a recipe that has an effect, and no other."""
    recipe = loaded(tmp_path, f"{{name: {name}}}")
    (tmp_path / "resolved.yaml").write_text(json.dumps(recipe.document))
    again = load_recipe(tmp_path / "resolved.yaml")
    assert again.training.optimizer == recipe.training.optimizer
    assert again.document["training"] == recipe.document["training"]


def test_every_optimizer_has_keys_a_row_and_an_engine() -> None:
    schema: Any = recipe_schema()
    section = schema["properties"]["training"]["properties"]["optimizer"]["properties"]
    assert set(section["name"]["enum"]) == set(OPTIMIZER_KEYS) == set(OPTIMIZERS)
    assert set(OPTIMIZERS) == set(ENGINES[DEFAULT_TARGET].optimizers)
    named = {key for keys in OPTIMIZER_KEYS.values() for key in keys}
    assert named == set(section) - {"name", "lr", "weight_decay"}


def test_a_recipe_without_them_is_the_same_recipe(tmp_path: Path) -> None:
    without = loaded(tmp_path, None).document["training"]
    null = loaded(tmp_path, "{momentum: null, ns_steps: null, adamw_lr: null}").document["training"]
    assert without == null
    assert "momentum" not in str(without)

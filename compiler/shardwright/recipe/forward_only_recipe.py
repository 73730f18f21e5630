"""Derive the recipe of a forward pass over a recipe's data: no optimizer, no gradients, a layout of
its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

from shardwright.recipe.recipe_loader import recipe_from_document
from shardwright.recipe.recipe_types import Recipe
from shardwright.utils.json_values import JsonObject, JsonValue

_LAUNCH_KEYS_OF_TRAINING = ("recovery", "outer_store")
_PLAIN_ENGINES = ("reference",)


def forward_only_recipe(
    recipe: Recipe, *, weights: Path | None = None, pinned: Mapping[str, JsonValue] | None = None
) -> Recipe:
    """Return the recipe whose plan runs the model forward over the same sequences.

    Everything is frozen, and activations are recomputed, so that the search finds no states of an
    optimizer, no gradients and no saved activations beside the weights. Its compute and its traffic
    are a whole multiple of a forward pass's, which orders the layouts alike.

    weights: a folder of Hugging Face's that replaces the recipe's weights
    pinned: of `parallelism`; the recipe's own layout is the training's
    """
    document = dict(recipe.document)
    model = {**_section(document, "model"), "freeze": ["*"]}
    if weights is not None:
        model |= {"source": str(weights), "weights": "pretrained"}
        for key in ("config", "revision"):
            model.pop(key, None)
    training = _section(document, "training")
    optimizer = cast(JsonObject, training.get("optimizer") or {})
    # Preferences decide what a sequence is; other objectives are for a backward pass.
    left_out = (
        {"outer"} if recipe.training.objective.traits.reads_preferences else {"outer", "objective"}
    )
    training = {k: v for k, v in training.items() if k not in left_out}
    training["optimizer"] = {"name": "adamw", "lr": optimizer.get("lr", 1e-4)}
    cluster = {k: v for k, v in _section(document, "cluster").items() if k not in _ISLAND_KEYS}
    launch = {
        k: v for k, v in _section(document, "launch").items() if k not in _LAUNCH_KEYS_OF_TRAINING
    }
    left = ("lora", "tracking", "extra", "checkpoint", "parallelism")
    document = {k: v for k, v in document.items() if k not in left}
    document |= {
        "target": recipe.target if recipe.target in _PLAIN_ENGINES else "deepspeed",
        "model": model,
        "cluster": cluster,
        "training": training,
        "launch": launch,
        "checkpoint": {"every_steps": None},
        "parallelism": {"activation_checkpointing": "full", **(pinned or {})},
    }
    derived = recipe_from_document(document, recipe.directory, recipe.source)
    return replace(derived, forward_only=True)


_ISLAND_KEYS = ("islands", "inter_island_gbits_per_second", "inter_island_latency_ms")


def _section(document: JsonObject, name: str) -> dict[str, JsonValue]:
    return dict(cast(JsonObject, document.get(name) or {}))

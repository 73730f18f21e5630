"""Derive the recipe of a forward pass over a recipe's data: no optimizer, no gradients, a layout of
its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

from shardwright.diagnostics import Refusal, found
from shardwright.engines.engine_table import DEFAULT_TARGET, ENGINES
from shardwright.launch.launchers.launcher_table import resolve_launcher
from shardwright.plan.folder_paths import HOSTFILE, MODEL_DIRECTORY, SETUP_SCRIPT
from shardwright.plan.plan import Plan
from shardwright.recipe.objectives import objective_under_own_weights
from shardwright.recipe.recipe_loader import recipe_from_document
from shardwright.recipe.recipe_types import DataSection, Recipe
from shardwright.utils.json_values import JsonObject, JsonValue

_ISLAND_KEYS = ("islands", "inter_island_gbits_per_second")
_LAUNCH_KEYS_OF_TRAINING = ("recovery", "outer_store")


def forward_only_recipe(
    recipe: Recipe, *, weights: Path | None = None, pinned: Mapping[str, JsonValue] | None = None
) -> Recipe:
    """Return the recipe whose plan runs the model forward over the same sequences.

    Everything is frozen, and activations are recomputed, so that the search finds no states of an
    optimizer, no gradients and no saved activations beside the weights. Its compute and its traffic
    are a whole multiple of a forward pass's, which orders the layouts alike.

    weights: a folder of Hugging Face's that replaces the recipe's weights
    pinned: of `parallelism`; the recipe's own layout is the training's

    Raises Refusal, SW1265, where its launcher starts nothing but trainings.
    """
    launcher = resolve_launcher(recipe.launch, recipe.cluster.nodes or 1)
    # Such jobs continue a training from its newest checkpoint, and take no other `--resume`.
    if launcher.scheduler is not None and not launcher.can_restart:
        is_named = recipe.launch.launcher != "auto"
        why = found(
            "SW1265",
            "launch.launcher" if is_named else f"launch.{launcher.name}",
            f"`score` cannot start its ranks by launch.launcher {launcher.name}",
            "Call it on a machine with the GPUs, or in a pod, with `--set launch=null --set "
            "cluster.nodes=1`; or where ssh reaches all nodes, with `--set launch=null --hostfile "
            "FILE`.",
        )
        raise Refusal(why, source=recipe.source)
    document = dict(recipe.document)
    model = {**_section(document, "model"), "freeze": ["*"]}
    if weights is not None:
        model |= {"source": str(weights), "weights": "pretrained"}
        for key in ("config", "revision", "trust_remote_code"):
            model.pop(key, None)
    training = _section(document, "training")
    optimizer = cast(JsonObject, training.get("optimizer") or {})
    # Pairs and labels decide what a sequence is; other objectives are for a backward pass.
    traits = recipe.training.objective.traits
    decides = traits.compares_pairs or traits.reads_labels
    left_out = {"outer"} if decides else {"outer", "objective"}
    training = {k: v for k, v in training.items() if k not in left_out}
    if isinstance(objective := training.get("objective"), dict):
        training["objective"] = objective_under_own_weights(objective)
    training["optimizer"] = {"name": "adamw", "lr": optimizer.get("lr", 1e-4)}
    cluster = {k: v for k, v in _section(document, "cluster").items() if k not in _ISLAND_KEYS}
    launch = {
        k: v for k, v in _section(document, "launch").items() if k not in _LAUNCH_KEYS_OF_TRAINING
    }
    scores = recipe.target in ENGINES and ENGINES[recipe.target].scores_tokens
    left = ("lora", "tracking", "extra", "checkpoint", "parallelism")
    document = {k: v for k, v in document.items() if k not in left}
    document |= {
        "target": recipe.target if scores else DEFAULT_TARGET,
        "model": model,
        "cluster": cluster,
        "training": training,
        "launch": launch,
        "checkpoint": {"every_steps": None},
        "parallelism": {"activation_checkpointing": "full", **(pinned or {})},
    }
    derived = recipe_from_document(document, recipe.directory, recipe.source)
    return replace(derived, forward_only=True)


def with_files_of_folder(recipe: Recipe, plan: Plan, folder: Path) -> Recipe:
    """Return the recipe of a compiled folder with the files that its plan names.

    Its own paths are relative to the folder of the recipe file.

    recipe: of recipe.resolved.json
    """
    document = dict(recipe.document)
    held_out = None if plan.validation is None else plan.validation.data
    for name, data in (("data", plan.data), ("validation", held_out)):
        if data is not None:
            document[name] = _planned_data(_section(document, name), data, folder)
    model = _section(document, "model")
    if (source := model.get("source")) is not None:
        place = plan.model.weights_path or str(folder.absolute() / MODEL_DIRECTORY)
        model["source"] = place
        if model.get("trust_remote_code") == source:
            model["trust_remote_code"] = place
        model.pop("revision", None)
    document["model"] = model
    launch = _section(document, "launch")
    for key, name in (("hostfile", HOSTFILE), ("setup_script", SETUP_SCRIPT)):
        if launch.get(key) is not None:
            launch[key] = str(folder.absolute() / name)
    document["launch"] = launch
    return recipe_from_document(document, recipe.directory, recipe.source)


def _planned_data(
    section: dict[str, JsonValue], data: DataSection, folder: Path
) -> dict[str, JsonValue]:
    """Return a data section of a recipe with the plan's paths."""
    if data.mixture:
        parts = cast("list[dict[str, JsonValue]]", section["mixture"])
        planned = [
            _planned_data(dict(part), own, folder)
            for part, own in zip(parts, data.mixture, strict=True)
        ]
        return {**section, "mixture": list(planned)}
    if data.path is not None:
        section["path"] = data.path
    if data.tokenizer not in (None, "byte"):
        section["tokenizer"] = str(folder.absolute() / str(data.tokenizer))
    if data.images is not None and isinstance(images := section.get("images"), dict):
        section["images"] = {**images, "folder": data.images.folder}
    return section


def _section(document: JsonObject, name: str) -> dict[str, JsonValue]:
    return dict(cast(JsonObject, document.get(name) or {}))

"""Traces every configuration of the catalog and of the shipped recipes, and writes the graphs into
the package."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from shardwright.models import graph_builder
from shardwright.models.graph_builder import graph_to_json
from shardwright.models.model_graph import ModelGraph
from shardwright.models.model_sources import catalog_config, catalog_ids
from shardwright.recipe.literal_types import TaskName
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.utils.installation import recipes_folder

PATH = Path(graph_builder.__file__).with_name(graph_builder.ARCHIVE)


def config_text(model_id: str) -> str:
    return json.dumps(catalog_config(model_id), sort_keys=True)


def recipe_config_texts() -> tuple[str, ...]:
    """Return the configurations that stand in shipped recipes, once each."""
    recipes = [load_recipe(path) for path in sorted(recipes_folder().glob("*.yaml"))]
    configs = [recipe.model.config for recipe in recipes if recipe.model.config is not None]
    return tuple(dict.fromkeys(json.dumps(config, sort_keys=True) for config in configs))


def recipe_task_texts() -> tuple[str, ...]:
    """Return "TASK CONFIGURATION" of the shipped recipes that train a catalog model for a task that
    they name."""
    recipes = [load_recipe(path) for path in sorted(recipes_folder().glob("*.yaml"))]
    named = [each.model for each in recipes if each.model.source and each.model.task != "auto"]
    return tuple(dict.fromkeys(f"{m.task} {config_text(str(m.source))}" for m in named))


def inline_task_texts() -> tuple[str, ...]:
    """Return "TASK CONFIGURATION" of the shipped recipes with a configuration that name a task."""
    recipes = [load_recipe(path) for path in sorted(recipes_folder().glob("*.yaml"))]
    named = [each.model for each in recipes if each.model.config and each.model.task != "auto"]
    return tuple(dict.fromkeys(f"{m.task} {json.dumps(m.config, sort_keys=True)}" for m in named))


def trace(text: str, inline: bool = False) -> ModelGraph:
    """Trace a configuration, or "TASK CONFIGURATION"."""
    from shardwright.models.graph_trace import trace_model_graph

    task, brace, config = text.partition("{")
    asked = cast("TaskName", task.strip() or "auto")
    return trace_model_graph(json.loads(brace + config), graph_builder.ATTENTION, inline, asked)


def archive_of(found: Mapping[tuple[str, bool], ModelGraph]) -> bytes:
    """graphs.zip: the same graphs are the same bytes.

    found: (configuration as text, whether it is in a recipe) -> its graph.
    """
    members = {graph_builder.member(*key): graph_to_json(graph) for key, graph in found.items()}
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, text in [
            (graph_builder.VERSIONS, json.dumps(graph_builder.versions())),
            *sorted(members.items()),
        ]:
            archive.writestr(
                zipfile.ZipInfo(name), text, zipfile.ZIP_DEFLATED, 9
            )  # ZipInfo: no clock, always 1980
    return content.getvalue()


def main() -> None:
    found = {(config_text(model_id), False): None for model_id in catalog_ids()}
    found |= {(text, False): None for text in recipe_task_texts()}
    found |= {(text, True): None for text in (*recipe_config_texts(), *inline_task_texts())}
    content = archive_of({key: trace(*key) for key in found})
    changed = not PATH.exists() or PATH.read_bytes() != content
    PATH.write_bytes(content)
    print(
        f"{PATH}: {len(found)} graphs, {len(content):,} bytes, "
        f"{'changed' if changed else 'as before'}"
    )


if __name__ == "__main__":
    main()

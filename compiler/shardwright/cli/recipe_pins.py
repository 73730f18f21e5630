"""`plan --pin ROW`: one row of the table becomes the `parallelism` section of a recipe, comments
and order kept."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.utils.atomic_write import write_atomically

if TYPE_CHECKING:
    from shardwright.layout.layout import Layout
    from shardwright.recipe.recipe_types import Recipe

WIDE = 4096  # columns: ruamel.yaml would fold the user's long lines


def write_pinned_recipe(text: str, target: Path, strategy: Layout, recipe: Recipe) -> None:
    """Writes `text`, a recipe that was read as `recipe`, with the pins in it; a file there is
    replaced whole."""
    write_atomically(
        target, recipe_text_with_pins(text, strategy, recipe, as_json=target.suffix == ".json")
    )


def recipe_text_with_pins(
    text: str, strategy: Layout, recipe: Recipe, *, as_json: bool = False
) -> str:
    """Pins stand in the file that was asked about, also where `auto` came from one that it
    extends."""
    if as_json:
        document = json.loads(text)
        _pin(document, strategy, recipe)
        return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    from ruamel.yaml import YAML

    yaml = YAML(typ="rt")
    yaml.preserve_quotes = True
    yaml.width = WIDE
    document = yaml.load(text)
    _pin(document, strategy, recipe)
    out = io.StringIO()
    yaml.dump(document, out)
    return out.getvalue()


def _pin(document: dict[str, Any], strategy: Layout, recipe: Recipe) -> None:
    _section(document, "parallelism").update(strategy.pins())
    training: Any = recipe.document["training"]
    if training["days_at_most"] is not None:  # the deadline has chosen the number of nodes
        _section(document, "cluster")["nodes"] = strategy.world_size // recipe.cluster.gpus_per_node
        _section(document, "training")["days_at_most"] = None


def _section(document: dict[str, Any], name: str) -> Any:
    if not isinstance(document.get(name), dict):
        document[name] = {}
    return document[name]

"""Completes the keys of DiLoCo islands, and derives the recipe of one island."""

from __future__ import annotations

from typing import cast

from shardwright.recipe.recipe_schema import (
    fill_in_defaults,
    recipe_schema,
    schema_properties,
)
from shardwright.recipe.recipe_types import optimizer_steps
from shardwright.utils.json_values import JsonObject

DEFAULT_OUTER_STORE = "127.0.0.1:29471"
DEFAULT_MIXING = 0.5
DEFAULT_OUTER_INTERVAL = 100


def island_count(document: JsonObject) -> int:
    """Return the number of islands; 1 where the document gives none, or no valid number."""
    cluster = document.get("cluster")
    value = cluster.get("islands") if isinstance(cluster, dict) else None
    return value if isinstance(value, int) and value > 1 else 1


def with_outer_defaults(document: JsonObject) -> JsonObject:
    """Fill in the defaults of islands: plain averaging, mixing with overlap, the outer store."""
    if island_count(document) == 1:
        return document
    training, launch = (cast(JsonObject, document[key]) for key in ("training", "launch"))
    section = schema_properties(schema_properties(recipe_schema(), document)["training"], training)[
        "outer"
    ]
    outer = cast(JsonObject, fill_in_defaults(section, training["outer"] or {}))
    if outer["overlap_steps"] and outer["mixing"] is None:
        outer = {**outer, "mixing": DEFAULT_MIXING}
    launch = {**launch, "outer_store": launch["outer_store"] or DEFAULT_OUTER_STORE}
    return {**document, "training": {**training, "outer": outer}, "launch": launch}


def single_island_document(document: JsonObject) -> JsonObject:
    """Return the document of one island: its nodes and its share of each global batch, with the
    same steps. Values that do not divide stay unchanged."""
    islands = island_count(document)
    if islands == 1:
        return document
    cluster, section = cast(JsonObject, document["cluster"]), document.get("training")
    if not isinstance(section, dict):
        return document
    training = dict(section)
    nodes, batch, tokens = (
        cluster.get("nodes"),
        training.get("global_batch_size"),
        training.get("tokens"),
    )
    if isinstance(nodes, int) and nodes % islands == 0:
        cluster = {**cluster, "nodes": nodes // islands}
    if isinstance(batch, int) and batch % islands == 0:
        training["global_batch_size"] = batch // islands
        length = training.get("sequence_length")
        if isinstance(tokens, int) and isinstance(length, int):
            training |= {"tokens": None, "steps": optimizer_steps(None, tokens, batch, length)}
    return {**document, "cluster": cluster, "training": training}

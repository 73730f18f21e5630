"""Checks the keys of DiLoCo islands against each other, and derives the recipe of one island."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from shardwright.diagnostics import Diagnostic, found
from shardwright.recipe.recipe_schema import (
    fill_in_defaults,
    join_with_or,
    recipe_schema,
    schema_properties,
)
from shardwright.recipe.recipe_types import optimizer_steps
from shardwright.utils.divisors import nearest_multiples
from shardwright.utils.json_values import JsonObject, JsonValue

DEFAULT_OUTER_STORE = "127.0.0.1:29471"
DEFAULT_MIXING = 0.5
_KEYS = ("islands", "inter_island_gbits_per_second")
ISLAND_KEYS = (
    *(
        "cluster.islands",
        "cluster.inter_island_gbits_per_second",
        "cluster.nodes",
        "training.global_batch_size",
    ),
    *("training.outer", "checkpoint.every_steps", "validation.every_steps", "launch.outer_store"),
)
"""Lists the keys that island_key_errors reads."""


def island_count(document: JsonObject) -> int:
    """Return the number of islands; 1 where the document gives none, or no valid number."""
    cluster = document.get("cluster")
    value = cluster.get("islands") if isinstance(cluster, dict) else None
    return value if isinstance(value, int) and value > 1 else 1


def with_outer_defaults(document: JsonObject) -> JsonObject:
    """Fill in the defaults of islands: plain averaging, mixing with overlap, the outer store.

    With one island their keys are dropped, so that a recipe with them and one without are equal.
    """
    cluster, training = (
        cast(JsonObject, document["cluster"]),
        cast(JsonObject, document["training"]),
    )
    launch = cast(JsonObject, document["launch"])
    if island_count(document) == 1:
        cluster = {key: value for key, value in cluster.items() if key not in _KEYS}
        training = {key: value for key, value in training.items() if key != "outer"}
        launch = {key: value for key, value in launch.items() if key != "outer_store"}
    else:
        section = schema_properties(
            schema_properties(recipe_schema(), document)["training"], training
        )["outer"]
        outer = cast(JsonObject, fill_in_defaults(section, training.get("outer") or {}))
        if outer["overlap_steps"] and outer["mixing"] is None:
            outer = {**outer, "mixing": DEFAULT_MIXING}
        training = {**training, "outer": outer}
        launch = {**launch, "outer_store": launch.get("outer_store") or DEFAULT_OUTER_STORE}
    return {**document, "cluster": cluster, "training": training, "launch": launch}


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


def island_key_errors(document: JsonObject) -> Iterable[Diagnostic]:
    """Yield SW1231 to SW1235 for a completed document whose ISLAND_KEYS have the right types."""
    cluster, training = (
        cast(JsonObject, document["cluster"]),
        cast(JsonObject, document["training"]),
    )
    outer = cast("JsonObject | None", training.get("outer"))
    launch = cast("JsonObject | None", document.get("launch")) or {}
    if island_count(document) == 1:
        given = {
            "cluster.inter_island_gbits_per_second": cluster.get("inter_island_gbits_per_second")
        }
        given |= {"training.outer": outer, "launch.outer_store": launch.get("outer_store")}
        for key, value in given.items():
            if value is not None:
                message = f"{key} has no effect: the recipe has one island"
                yield found(
                    "SW1232",
                    key,
                    message,
                    "Remove it, or write `cluster.islands:` with more than one.",
                )
        return
    yield from _division(document)
    if cluster.get("inter_island_gbits_per_second") is None:
        message = "cluster.islands needs the rate of the link between them"
        help = (
            "Add `inter_island_gbits_per_second:` under `cluster`: Gbit/s of each island's "
            "link, one direction."
        )
        yield found("SW1232", "cluster.islands", message, help)
    yield from _multiples(document, cast(int, (outer or {}).get("every_steps", 100)))
    yield from _optimizer(outer or {})
    yield from _overlap(outer or {})


def _division(document: JsonObject) -> Iterable[Diagnostic]:
    islands = island_count(document)
    nodes, batch = (
        cast(JsonObject, document[s]).get(k)
        for s, k in (("cluster", "nodes"), ("training", _BATCH))
    )
    if nodes == "auto":
        message = "cluster.nodes: auto does not choose the nodes of several islands"
        yield found(
            "SW1232", "cluster.nodes", message, "Give the number of nodes of all islands together."
        )
    for key, value in (("cluster.nodes", nodes), (f"training.{_BATCH}", batch)):
        if isinstance(value, int) and value % islands:
            near = tuple(map(str, nearest_multiples(islands, value)))
            message = f"{key.rpartition('.')[2]} {value} does not divide over {islands} islands"
            yield found(
                "SW1231",
                key,
                message,
                f"Each island has an equal part: {join_with_or(near)}.",
                near,
            )


_BATCH = "global_batch_size"


def _multiples(document: JsonObject, every: int) -> Iterable[Diagnostic]:
    for section in ("checkpoint", "validation"):
        value = (cast("JsonObject | None", document.get(section)) or {}).get("every_steps")
        if isinstance(value, int) and value % every:
            near = tuple(map(str, nearest_multiples(every, value)))
            message = (
                f"{section}.every_steps {value} is not a multiple of training.outer.every_steps "
                f"{every}"
            )
            help = (
                "Between outer steps each island has weights of its own. Write "
                f"{join_with_or(near)}."
            )
            yield found("SW1233", f"{section}.every_steps", message, help, near)


def _optimizer(outer: JsonObject) -> Iterable[Diagnostic]:
    given: dict[str, JsonValue] = {key: outer.get(key) for key in ("lr", "momentum")}
    for key, value in given.items():
        if outer.get("optimizer") == "nesterov" and value is None:
            message = f"training.outer.optimizer: nesterov needs `{key}`"
            help = (
                "There is no value that fits all. The papers' best outer rate, at momentum 0.9, "
                "was about 0.4, 0.6, 0.6 and 0.8 for 1, 2, 4 and 8 islands (arXiv 2503.09799); "
                "plain averaging needs neither."
            )
            yield found("SW1235", "training.outer.optimizer", message, help)
        elif outer.get("optimizer", "average") == "average" and value is not None:
            message = f"training.outer.{key} is for nesterov, and the outer optimizer is average"
            yield found(
                "SW1235",
                f"training.outer.{key}",
                message,
                "Remove it, or write `optimizer: nesterov`.",
            )


def _overlap(outer: JsonObject) -> Iterable[Diagnostic]:
    steps, every = (
        cast(int, outer.get("overlap_steps") or 0),
        cast(int, outer.get("every_steps", 100)),
    )
    if steps >= every:
        message = f"training.outer.overlap_steps {steps} is not less than every_steps {every}"
        help = f"An outer step arrives before the next one begins: write at most {every - 1}."
        yield found("SW1235", "training.outer.overlap_steps", message, help, (every - 1,))
    elif not steps and outer.get("mixing") is not None:
        message = "training.outer.mixing is for overlap, and overlap_steps is 0"
        yield found(
            "SW1235",
            "training.outer.mixing",
            message,
            "Remove it, or write `overlap_steps:` with more.",
        )

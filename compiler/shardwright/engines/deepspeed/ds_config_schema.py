"""The committed snapshots: one JSON file a DeepSpeed version, written by `make snapshot` from the
installed one.

A property is a small JSON Schema: type, enum, minimum and its kin, properties, items. Words of its
own: `checked` (a pydantic model of DeepSpeed reads the section: unknown keys raise, numbers in text
are converted), `any_case`, `exact` (0 and 1 are no booleans), `deprecated` (by which key),
`same_as` (the other name of a key), `open` (any keys), `auto` (the text "auto" is a value of
DeepSpeed's own). An empty type is anything; `python` is nothing that a file can hold.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import cast

from shardwright.utils.json_types import JsonObject, JsonValue

NEWEST = "0.19.8"


@dataclass(frozen=True, slots=True, kw_only=True)
class DsConfigSchema:
    """What one DeepSpeed version takes.

    schema: of the whole document. removed: dotted keys that it refuses because the feature is gone.
    optimizers, schedulers: name -> {"params": names or None (unknown), "required": names, "zero" or
    "own": flag}. optimizer_values, scheduler_values: the properties of their `params`.
    """

    version: str
    schema: JsonObject
    removed: tuple[str, ...]
    optimizers: Mapping[str, JsonObject]
    schedulers: Mapping[str, JsonObject]
    optimizer_values: JsonObject
    scheduler_values: JsonObject


@functools.cache
def ds_config_schema(version: str = NEWEST) -> DsConfigSchema:
    folder = resources.files("shardwright.engines.deepspeed.ds_config_schemas")
    table = cast(
        "dict[str, JsonValue]", json.loads(folder.joinpath(f"{version}.json").read_text("utf-8"))
    )
    return DsConfigSchema(
        version=version,
        schema=cast(JsonObject, table["schema"]),
        removed=tuple(cast("list[str]", table["removed"])),
        optimizers=cast("Mapping[str, JsonObject]", table["optimizers"]),
        schedulers=cast("Mapping[str, JsonObject]", table["schedulers"]),
        optimizer_values=cast(JsonObject, table["optimizer_values"]),
        scheduler_values=cast(JsonObject, table["scheduler_values"]),
    )

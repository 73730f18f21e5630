"""The configurations of popular models, as data: one JSON file a family, hub id -> config.json as
published.

An entry with "like" is another entry of any file with the keys beside it changed: the hub's own
redirects, and instruct models that differ from their base in nothing but special tokens or the
length they were tuned for. Left out everywhere: keys that say how weights are stored or who wrote
the file (torch_dtype, architectures, quantization...). The test of this folder compares each one's
parameter count with the published number.
"""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Mapping
from importlib import resources
from typing import cast

from shardwright.utils.json_types import JsonObject

LIKE = "like"


def catalog_ids() -> tuple[str, ...]:
    """Every hub id, sorted."""
    return tuple(sorted(_entries()))


def catalog_config(model_id: str) -> JsonObject | None:
    """The whole configuration of `model_id` at revision main; None where it is not shipped."""
    entry = _entries().get(model_id)
    if entry is None:
        return None
    own = {key: value for key, value in entry.items() if key != LIKE}
    if LIKE not in entry:
        return own
    base = catalog_config(str(entry[LIKE]))
    if base is None:
        raise ValueError(f"{model_id} is like {entry[LIKE]}, which is not shipped")
    return {**base, **own}


@functools.cache
def published_keys(model_type: str) -> frozenset[str]:
    """Every key of the shipped configurations of this type: modeling code reads some that no class
    lists."""
    configs = [catalog_config(model_id) or {} for model_id in catalog_ids()]
    return frozenset(
        key for config in configs if config.get("model_type") == model_type for key in config
    )


def match_catalog_id(text: str) -> str | None:
    """The hub id that `text` means: the id itself, or its last part in any case where only one id
    ends in it."""
    if text in _entries():
        return text
    matches = [
        model_id
        for model_id in catalog_ids()
        if model_id.rpartition("/")[2].lower() == text.lower()
    ]
    return matches[0] if len(matches) == 1 else None


def nearest_ids(text: str) -> tuple[str, ...]:
    """Up to three ids that look like `text`, whoever publishes them; the nearest first."""
    short = {model_id.lower(): model_id for model_id in catalog_ids()}
    found = difflib.get_close_matches(text.lower(), short, n=3, cutoff=0.6)
    tails: dict[str, str] = {}
    for model_id in catalog_ids():
        tails.setdefault(model_id.rpartition("/")[2].lower(), model_id)
    found_tails = difflib.get_close_matches(text.rpartition("/")[2].lower(), tails, n=3, cutoff=0.6)
    return tuple(dict.fromkeys([*(short[f] for f in found), *(tails[t] for t in found_tails)]))[:3]


@functools.cache
def _entries() -> Mapping[str, JsonObject]:
    entries: dict[str, JsonObject] = {}
    files = (
        f
        for f in resources.files("shardwright.models.popular").iterdir()
        if f.name.endswith(".json")
    )
    for file in sorted(files, key=lambda f: f.name):
        table = cast("dict[str, JsonObject]", json.loads(file.read_text("utf-8")))
        twice = entries.keys() & table.keys()
        if twice:
            raise ValueError(f"{file.name} repeats {sorted(twice)}")
        entries |= table
    return entries

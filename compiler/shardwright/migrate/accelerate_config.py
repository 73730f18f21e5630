"""Accelerate's own configuration file (`accelerate config`) -> options of its launcher, as they
would be typed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from shardwright.diagnostics import Diagnostic, Location, Refusal, Source, found
from shardwright.recipe.parse_events import LineOffsets
from shardwright.recipe.recipe_nodes import node_value
from shardwright.recipe.recipe_tree import MAX_RECIPE_BYTES, parse_recipe_text
from shardwright.utils.bounded_read import read_regular_text_file
from shardwright.utils.json_types import JsonObject, JsonValue

SECTION = "deepspeed_config"


def read_accelerate_config(path: str) -> dict[str, str]:
    """Option -> value, those of the DeepSpeed section among them. Raises Refusal (SW1452)."""
    try:
        text = read_regular_text_file(path, MAX_RECIPE_BYTES)
    except (OSError, ValueError) as error:
        cause = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise Refusal(_error(path, f"--config_file: {path} cannot be read: {cause}")) from None
    node, errors = parse_recipe_text(text, LineOffsets(path, text))
    source = Source(file=path, texts={path: text})
    if errors:
        raise Refusal(*(replace(error, code="SW1452") for error in errors), source=source)
    document = None if node is None else node_value(node)
    if not isinstance(document, Mapping):
        raise Refusal(
            _error(path, f"--config_file: {path} holds no keys of Accelerate"), source=source
        )
    return dict(_options(document))


def _options(document: JsonObject) -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in document.items():
        if key == SECTION and isinstance(value, Mapping):
            found |= _options(value)
        elif not isinstance(value, Mapping | list):
            # The one option that has another name on the command line.
            found["hostfile" if key == "deepspeed_hostfile" else key] = _text(value)
    return found


def _text(value: JsonValue) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if value is None else str(value)


def resolve_config_path(path: str, name: str) -> str:
    """A file that the configuration names: relative to the working folder, as Accelerate reads it,
    else to its own."""
    own = os.path.join(os.path.dirname(path), name)
    return name if os.path.isfile(name) or not os.path.isfile(own) else own


def _error(path: str, message: str) -> Diagnostic:
    help = "Give the YAML file that `accelerate config` wrote."
    return found("SW1452", Location(file=path, line=0, column=0), message, help)

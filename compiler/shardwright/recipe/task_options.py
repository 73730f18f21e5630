"""Checks `launch.task.options` against the published schema of the service's task file:
task_schemas/ has one a service."""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from shardwright.diagnostics import Diagnostic, KeyPath, found
from shardwright.recipe.recipe_schema import dotted_key
from shardwright.utils.json_values import JsonObject

KEY: KeyPath = ("launch", "task", "options")
_FOLDER = Path(__file__).with_name("task_schemas")
TASK_SERVICES: Mapping[str, str] = {"skypilot": "SkyPilot", "dstack": "dstack"}
"""Maps a launcher that writes a task file to its service."""
_NODES = "cluster.nodes decides it"
_IMAGE = "launch.task.image decides it"
_VARIABLES = "launch.env and launch.env_from decide it"
_VOLUMES = "launch.task.volumes decides it"
_GPUS = "launch.task.gpu and cluster.gpus_per_node decide it"
_RECOVERY = "launch.recovery decides it"
_START = "launch/node.sh, in launch.task.directory, starts the node's ranks"
RESERVED_FIELDS: Mapping[str, Mapping[str, str]] = {
    "skypilot": {
        "name": "the recipe's name decides it",
        "num_nodes": _NODES,
        "run": _START,
        "envs": _VARIABLES,
        "secrets": _VARIABLES,
        "volumes": _VOLUMES,
        "resources.accelerators": _GPUS,
        "resources.image_id": _IMAGE,
        "resources.job_recovery": _RECOVERY,
    },
    "dstack": {
        "type": "a run is a task",
        "name": "the recipe's name decides it",
        "nodes": _NODES,
        "groups": _NODES,
        "commands": _START,
        "working_dir": _START,
        "env": _VARIABLES,
        "image": _IMAGE,
        "volumes": _VOLUMES,
        "resources.gpu": _GPUS,
        "retry": _RECOVERY,
    },
}
"""Maps a launcher to the keys of its task file that another key of the recipe decides."""


@functools.cache
def task_schema(launcher: str) -> Mapping[str, Any]:
    """Return the JSON schema of a launcher's task file."""
    text = (_FOLDER / f"{launcher}.json").read_text(encoding="utf-8")
    return cast("Mapping[str, Any]", json.loads(text))


def task_option_errors(options: JsonObject, launcher: str) -> Iterator[Diagnostic]:
    """Yield SW1254 for keys that another key decides, and SW1255 for unknown ones."""
    yield from _errors(options, task_schema(launcher), launcher, "")


def _errors(
    options: JsonObject, schema: Mapping[str, Any], launcher: str, above: str
) -> Iterator[Diagnostic]:
    service = TASK_SERVICES[launcher]
    known, is_open = schema["properties"], schema.get("additionalProperties", True)
    for name, value in options.items():
        place = f"{above}{name}"
        key = (*KEY, *place.split("."))
        if why := RESERVED_FIELDS[launcher].get(place):
            message = f"{dotted_key(key)}: {why}"
            yield found("SW1254", key, message, "Remove it, and change that key.")
        elif name not in known and not is_open:
            near = difflib.get_close_matches(name, known, 1)
            help = f"Did you mean `{near[0]}`?" if near else "Remove it."
            message = f"{dotted_key(key)}: a task of {service} has no such key"
            yield found("SW1255", key, message, help, tuple(near))
        elif isinstance(value, Mapping) and name in known:
            below = known[name]
            if "$ref" in below:
                below = task_schema(launcher)["$defs"][below["$ref"].rpartition("/")[2]]
            if "properties" in below:
                yield from _errors(value, below, launcher, f"{place}.")

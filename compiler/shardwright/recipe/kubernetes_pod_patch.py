"""Checks `launch.kubernetes.pod_patch` against Kubernetes' pod template: pod_fields.json has the
fields of each type, written by tools/generate/kubernetes_pod_fields.py from the published API.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from shardwright.diagnostics import Diagnostic, KeyPath, found
from shardwright.recipe.recipe_schema import describe_value, dotted_key, quote_text
from shardwright.recipe.recipe_types import POD_CONTAINER, POD_LABEL
from shardwright.utils.json_values import JsonObject, JsonValue

TABLE_FILE = Path(__file__).with_name("pod_fields.json")
POD_TEMPLATE_TYPE = "PodTemplateSpec"
_KIND = re.compile(r"(?P<open>[\[{]?)(?P<item>\w+)[\]}]?(?: (?P<key>\w+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class PodFieldType:
    """Describes a field. holds: one | list | map. item: string, integer, number, boolean, any, or a
    type with fields of its own.

    merge_key: the field that identifies the list item to patch; "" where the patch replaces the
    list.
    """

    holds: str
    item: str
    merge_key: str = ""


def kubernetes_version() -> str:
    return str(_table()["version"])


@functools.cache
def pod_fields_of(type_name: str) -> Mapping[str, PodFieldType]:
    """Return the fields of a type; {} where it has none of its own."""
    fields = {}
    for name, text in _table()["types"].get(type_name, {}).items():
        match = _KIND.fullmatch(text)
        if match is None:
            raise ValueError(f"{TABLE_FILE.name}: {text!r} is no kind of value")
        holds = {"": "one", "[": "list", "{": "map"}[match["open"]]
        fields[name] = PodFieldType(holds=holds, item=match["item"], merge_key=match["key"] or "")
    return fields


@functools.cache
def _table() -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", json.loads(TABLE_FILE.read_text(encoding="utf-8")))


KEY: KeyPath = ("launch", "kubernetes", "pod_patch")
MAX_POD_PATCH_ERRORS = 20
"""Bounds the errors shown: a pasted manifest of another kind has hundreds."""
_WORDS: dict[str, tuple[tuple[type, ...], str]] = {
    "string": ((str,), "text"),
    "boolean": ((bool,), "true or false"),
    "integer": ((int,), "an integer"),
    "number": ((int, float), "a number"),
    "any": ((str, int, float, bool), "text or a number"),
}

_RESTARTS = "launch.kubernetes.kind and restarts decide when a pod starts again"
_NAMES = "the ranks meet at the pods' names"
_COMMAND = "launch/node.sh, in launch.kubernetes.directory, starts the node's ranks"
RESERVED_FIELDS: dict[tuple[str, ...], str] = {
    ("metadata", "name"): _NAMES,
    ("metadata", "namespace"): "launch.kubernetes.namespace decides it",
    ("metadata", "labels", POD_LABEL): "the service finds the pods by it",
    ("spec", "restartPolicy"): _RESTARTS,
    ("spec", "subdomain"): _NAMES,
    ("spec", "hostname"): _NAMES,
    ("spec", "hostnameOverride"): _NAMES,
    ("spec", "containers", POD_CONTAINER, "image"): "launch.kubernetes.image decides it",
    ("spec", "containers", POD_CONTAINER, "command"): _COMMAND,
    ("spec", "containers", POD_CONTAINER, "args"): _COMMAND,
    ("spec", "containers", POD_CONTAINER, "workingDir"): _COMMAND,
    ("spec", "containers", POD_CONTAINER, "restartPolicy"): _RESTARTS,
    ("spec", "containers", POD_CONTAINER, "env", "MASTER_ADDR"): "launch.master_addr decides it",
    ("spec", "volumes", "shared"): "launch.kubernetes.volume_claim and mount_path decide it",
}
"""Maps a place in the pod template (list items by name) to the reason why no patch may change
it."""


def pod_patch_errors(
    patch: JsonObject, gpu_resource: str, env_from: tuple[str, ...]
) -> Iterator[Diagnostic]:
    """Yield SW1221 for unknown fields, SW1222 for values of another type, and SW1223 for places
    that another key decides."""
    container = ("spec", "containers", POD_CONTAINER)
    reserved = RESERVED_FIELDS | {
        (*container, "env", variable): "launch.env_from decides it" for variable in env_from
    }
    for kind in ("limits", "requests"):
        reserved[(*container, "resources", kind, gpu_resource)] = "cluster.gpus_per_node decides it"
    yield from itertools.islice(
        _check_fields(POD_TEMPLATE_TYPE, patch, KEY, (), reserved), MAX_POD_PATCH_ERRORS
    )


def _check_fields(
    type_name: str,
    value: JsonObject,
    key: KeyPath,
    place: tuple[str, ...],
    reserved: Mapping[tuple[str, ...], str],
) -> Iterator[Diagnostic]:
    known = pod_fields_of(type_name)
    for field, below in value.items():
        there = (*place, field)
        if field not in known:
            near = tuple(difflib.get_close_matches(field, known, n=1, cutoff=0.6))
            version, shown = kubernetes_version(), quote_text(field)
            message = f"{dotted_key(key)}: Kubernetes {version} has no field {shown} here"
            help = f"Did you mean `{near[0]}`?" if near else f"Fields here: {', '.join(known)}."
            yield found("SW1221", (*key, field), message, help, near)
        elif (why := _reason(there, below, reserved)) is not None:
            yield _reserved_error((*key, field), why)
        else:
            yield from _check_value(known[field], below, (*key, field), there, reserved)


def _reason(
    place: tuple[str, ...], value: JsonValue, reserved: Mapping[tuple[str, ...], str]
) -> str | None:
    """Return why the place is reserved; null is refused above a reserved place as well."""
    if value is None:
        return next((why for there, why in reserved.items() if there[: len(place)] == place), None)
    return reserved.get(place)


def _check_value(
    kind: PodFieldType,
    value: JsonValue,
    key: KeyPath,
    place: tuple[str, ...],
    reserved: Mapping[tuple[str, ...], str],
) -> Iterator[Diagnostic]:
    if kind.holds == "list" and isinstance(value, list):
        for index, item in enumerate(value):
            there = (*place, str(index))
            if kind.merge_key and isinstance(item, Mapping):
                if kind.merge_key not in item:
                    yield _value_error(
                        (*key, index), f"has no {kind.merge_key}", f"Add `{kind.merge_key}:`."
                    )
                    continue
                there = (*place, str(item[kind.merge_key]))
            if there in reserved:
                yield _reserved_error((*key, index), reserved[there])
            else:
                yield from _check_item(kind.item, item, (*key, index), there, reserved)
    elif kind.holds == "map" and isinstance(value, Mapping):
        for field, below in value.items():
            if (why := _reason((*place, field), below, reserved)) is not None:
                yield _reserved_error((*key, field), why)
            elif below is not None:  # null removes it
                yield from _check_item(kind.item, below, (*key, field), (*place, field), reserved)
    elif kind.holds == "one" and value is not None:
        yield from _check_item(kind.item, value, key, place, reserved)
    elif value is not None:
        yield _other_type(key, "a list" if kind.holds == "list" else "a mapping", value)


def _check_item(
    type_name: str,
    value: JsonValue,
    key: KeyPath,
    place: tuple[str, ...],
    reserved: Mapping[tuple[str, ...], str],
) -> Iterator[Diagnostic]:
    if type_name not in _WORDS:
        if isinstance(value, Mapping):
            yield from _check_fields(type_name, value, key, place, reserved)
            return
        wanted, fits = "a mapping", False
    else:
        types, wanted = _WORDS[type_name]
        fits = isinstance(value, types) and (
            isinstance(value, bool) <= (type_name in ("boolean", "any"))
        )
    if not fits:
        yield _other_type(key, wanted, value)


def _reserved_error(key: KeyPath, why: str) -> Diagnostic:
    return found("SW1223", key, f"{dotted_key(key)} cannot be set here: {why}", "Remove it.")


def _other_type(key: KeyPath, wanted: str, value: JsonValue) -> Diagnostic:
    return _value_error(
        key, f"expected {wanted}, got {describe_value(value, typed=True)}", f"Give {wanted}."
    )


def _value_error(key: KeyPath, what: str, help: str) -> Diagnostic:
    return found("SW1222", key, f"{dotted_key(key)}: {what}", help)

"""A Kubernetes manifest with the recipe's patch of the pod template merged in, as `kubectl patch`
merges one."""

from __future__ import annotations

import io
from collections.abc import Mapping, MutableMapping, MutableSequence
from typing import Any, cast

from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import DoubleQuotedScalarString

from shardwright.recipe.pod_fields import POD_TEMPLATE_TYPE, PodFieldType, pod_fields_of
from shardwright.utils.json_types import JsonObject, JsonValue

ANY = PodFieldType(holds="map", item="any")


def apply_pod_patch(manifest: str, patch: JsonObject) -> str:
    """manifest: a Job or a JobSet, whose comments stay."""
    yaml = YAML(typ="rt")
    yaml.preserve_quotes = True
    yaml.width = 2**16  # a line is never folded
    yaml.indent(mapping=2, sequence=4, offset=2)
    document = yaml.load(manifest)
    spec = document["spec"]
    for job in spec.get("replicatedJobs", []):
        spec = job["template"]["spec"]
    _merge_fields(spec["template"], patch, POD_TEMPLATE_TYPE)
    out = io.StringIO()
    yaml.dump(document, out)
    return out.getvalue()


def _merge_fields(target: MutableMapping[str, Any], patch: JsonObject, type_name: str) -> None:
    known = pod_fields_of(type_name)
    for field, value in patch.items():
        kind, below = known.get(field, ANY), target.get(field)
        if value is None:
            target.pop(field, None)
        elif kind.merge_key and isinstance(below, MutableSequence):
            _merge_items(below, cast("list[JsonObject]", value), kind)
        elif isinstance(value, Mapping) and isinstance(below, MutableMapping):
            _merge_fields(below, value, kind.item if kind.holds == "one" else ANY.item)
        else:
            target[_key(field, type_name)] = _quoted(value, kind)


def _merge_items(target: MutableSequence[Any], patch: list[JsonObject], kind: PodFieldType) -> None:
    for item in patch:
        name = item[kind.merge_key]
        same = next((each for each in target if each.get(kind.merge_key) == name), None)
        if same is None:
            target.append(_quoted(item, PodFieldType(holds="one", item=kind.item)))
        else:
            _merge_fields(
                same,
                {key: value for key, value in item.items() if key != kind.merge_key},
                kind.item,
            )


def _quoted(value: JsonValue, kind: PodFieldType) -> Any:
    """Without what is null, and every text in quotes."""
    if isinstance(value, Mapping):
        type_name = kind.item if kind.holds == "one" else ANY.item
        known = pod_fields_of(type_name)
        given = {key: below for key, below in value.items() if below is not None}
        return {
            _key(key, type_name): _quoted(below, known.get(key, ANY))
            for key, below in given.items()
        }
    if isinstance(value, list):
        return [_quoted(item, PodFieldType(holds="one", item=kind.item)) for item in value]
    return DoubleQuotedScalarString(value) if isinstance(value, str) else value


def _key(name: str, type_name: str) -> str:
    """The user's own, such as a label's, in quotes: `on` is no text to every reader of YAML."""
    return name if pod_fields_of(type_name) else DoubleQuotedScalarString(name)

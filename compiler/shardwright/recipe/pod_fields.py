"""What Kubernetes knows of a pod template: the fields of each of its types (pod_fields.json,
written by tools/generate/kubernetes_pod_fields.py from the published API)."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

TABLE_FILE = Path(__file__).with_name("pod_fields.json")
POD_TEMPLATE_TYPE = "PodTemplateSpec"
_KIND = re.compile(r"(?P<open>[\[{]?)(?P<item>\w+)[\]}]?(?: (?P<key>\w+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class PodFieldType:
    """holds: one | list | map. item: string, integer, number, boolean, any, or a type with fields
    of its own.

    merge_key: the field by which a patch finds the item of a list that it means; "" where it
    replaces the list.
    """

    holds: str
    item: str
    merge_key: str = ""


def kubernetes_version() -> str:
    return str(_table()["version"])


@functools.cache
def pod_fields_of(type_name: str) -> Mapping[str, PodFieldType]:
    """{} for what has no fields of its own."""
    return {name: _kind(text) for name, text in _table()["types"].get(type_name, {}).items()}


@functools.cache
def _table() -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", json.loads(TABLE_FILE.read_text(encoding="utf-8")))


def _kind(text: str) -> PodFieldType:
    match = _KIND.fullmatch(text)
    if match is None:
        raise ValueError(f"{TABLE_FILE.name}: {text!r} is no kind of value")
    holds = {"": "one", "[": "list", "{": "map"}[match["open"]]
    return PodFieldType(holds=holds, item=match["item"], merge_key=match["key"] or "")

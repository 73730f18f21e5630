"""Writes recipe/pod_fields.json from Kubernetes' published schema."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from shardwright.recipe.kubernetes_pod_patch import TABLE_FILE

VERSION = "1.37"
ROOT = "io.k8s.api.core.v1.PodTemplateSpec"
Schema = dict[str, Any]


def definitions() -> Schema:
    folder = files("kubernetes_validate") / "kubernetes-json-schema" / f"v{VERSION}.0-local-strict"
    found: Schema = json.loads((folder / "_definitions.json").read_text(encoding="utf-8"))["$defs"]
    return found


def text() -> str:
    schemas, types = definitions(), dict[str, dict[str, str]]()

    def named(name: str) -> str:
        if "properties" not in schemas[name]:
            return "any"
        short = name.rpartition(".")[2]
        if short not in types:
            types[short] = {}
            types[short].update(
                (key, kind(value)) for key, value in sorted(schemas[name]["properties"].items())
            )
        return short

    def kind(schema: Schema) -> str:
        if "$ref" in schema:
            return named(str(schema["$ref"]).rpartition("/")[2])
        wanted = schema.get("type", [])
        (first, *_) = (
            [wanted] if isinstance(wanted, str) else [t for t in wanted if t != "null"] or ["any"]
        )
        if first == "array":
            key = schema.get("x-kubernetes-patch-merge-key", "")
            return f"[{kind(schema['items'])}] {key}".strip()
        if first == "object":
            return "{" + kind(schema.get("additionalProperties", {})) + "}"
        return str(first)

    named(ROOT)
    rows = ",\n".join(
        f"    {json.dumps(name)}: {json.dumps(fields)}" for name, fields in sorted(types.items())
    )
    source = (
        f"OpenAPI of Kubernetes {VERSION} as PyPI's kubernetes-validate ships it, from {ROOT} down"
    )
    return (
        f'{{\n  "source": {json.dumps(source)},\n  "version": "{VERSION}",\n  "types": '
        f"{{\n{rows}\n  }}\n}}\n"
    )


if __name__ == "__main__":
    TABLE_FILE.write_text(text(), encoding="utf-8")

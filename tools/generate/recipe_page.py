"""docs/recipe.md: every key of a recipe, from the JSON Schema."""

from __future__ import annotations

import json
from typing import Any, cast

from shardwright.engines.deepspeed.deepspeed_capabilities import EXTRA_KEYS_REFUSED_IN_PIPELINE
from shardwright.engines.deepspeed.ds_config import EXTRA_KEYS_ALLOWED, EXTRA_KEYS_REFUSED
from shardwright.recipe.recipe_schema import recipe_schema

KINDS = ("text", "jsonl", "parquet", "chat", "preference", "tokens", "megatron", "synthetic")
OPEN = ("model.config",)  # its keys are Hugging Face's, not ours

Schema = dict[str, Any]


def page() -> str:
    schema = cast(Schema, recipe_schema())
    lines = [
        "# The keys of a recipe",
        "",
        "<!-- made by `make generated` from compiler/shardwright/recipe/recipe.schema.json -->",
        "",
        f"{schema['description']} `shardwright schema` prints the JSON Schema itself, for editors; "
        "`shardwright check` says what is wrong in a recipe, with line and column.",
        "",
        "In the column of defaults, `required` means that the key must be given; in an optional "
        "section, only if the section is given. A key with the default `null` may be left out or "
        "set to null, and one with the default none may be left out: the last column says what "
        "holds then. In the column of values, the word nothing means null.",
        "",
        "## The recipe",
        "",
        *table(schema, "", sections=False),
    ]
    for name, section in schema["properties"].items():
        resolved = merged(section)
        if name == "data":
            lines += _data(resolved)
        elif "properties" in resolved:
            lines += [
                "",
                f"## {name}",
                "",
                str(resolved["description"]),
                "",
                *table(resolved, f"{name}."),
            ]
    return "\n".join([*lines, *_extra()]) + "\n"


def _extra() -> list[str]:
    """What may stand in `extra`, as compile has it."""
    return [
        "",
        "## extra",
        "",
        "`extra` accepts these keys and sections of DeepSpeed's configuration, under DeepSpeed's "
        "names. `make prove` trains with each of them, saves, and resumes on another layout:",
        "",
        ", ".join(f"`{key}`" for key in EXTRA_KEYS_ALLOWED) + ".",
        "",
        *(
            f"- `{key}` runs only without a pipeline: {why}."
            for key, why in EXTRA_KEYS_REFUSED_IN_PIPELINE.items()
        ),
        *(f"- `{key}` is rejected: {why}." for key, why in EXTRA_KEYS_REFUSED.items()),
        "- A key that the plan decides is rejected, and the message names the recipe's key for it. "
        "Every other key is rejected because it changes what is trained without the plan's "
        "knowledge.",
    ]


def _data(section: Schema) -> list[str]:
    intro = (
        f"{section['description']} `data.kind` decides the other keys. `validation` takes the same "
        "keys, without `mixture`, if it has data of its own."
    )
    lines = ["", "## data", "", intro, ""]
    lines += HEADER
    known: dict[str, tuple[list[str], Schema]] = {}
    for kind in KINDS:
        for key, value in _of_kind(kind).items():
            known.setdefault(json.dumps([key, value]), ([], {"key": key, "schema": value}))[
                0
            ].append(kind)
    for kinds, entry in known.values():
        taken_by = "" if len(kinds) == len(KINDS) else f"For {_listed(kinds)} data. "
        schema, key = merged(entry["schema"]), f"data.{entry['key']}"
        required = entry["key"] in ("kind", "path")
        lines.append(row(key, schema, required=required, taken_by=taken_by))
        if "properties" in schema:
            lines += _rows(schema, f"{key}.", sections=True)
    part = merged(recipe_schema_def("mixture_part"))
    mixture = recipe_schema_def("kind_or_mixture")["then"]["properties"]["mixture"]
    lines.append(row("data.mixture", merged(mixture), required=False))
    lines.append(row("data.mixture[].weight", merged(part["properties"]["weight"]), required=True))
    return [*lines, "", "A part of `data.mixture` also has the keys of its own `kind`."]


def _listed(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _of_kind(kind: str) -> Schema:
    keys: Schema = dict(recipe_schema_def("data_kind")["properties"])
    for branch in recipe_schema_def("data_kind")["allOf"]:
        if branch["if"]["properties"]["kind"]["const"] == kind:
            keys |= merged(branch["then"])["properties"]
    return keys


HEADER = ["| key | value | default | meaning |", "|---|---|---|---|"]


def table(schema: Schema, prefix: str, *, sections: bool = True) -> list[str]:
    """A row a key, those of nested mappings by their dotted names. sections: nested ones too."""
    return [*HEADER, *_rows(schema, prefix, sections)]


def _rows(schema: Schema, prefix: str, sections: bool) -> list[str]:
    required = set(schema.get("required", ()))
    rows = []
    for key, value in schema["properties"].items():
        resolved = merged(value)
        if "properties" in resolved and prefix + key not in OPEN:
            if sections:
                rows.append(row(prefix + key, resolved, required=key in required))
                rows += _rows(resolved, f"{prefix}{key}.", sections)
        elif not (prefix == "" and key in ("data", "validation")):
            rows.append(row(prefix + key, resolved, required=key in required))
            for branch in resolved.get("anyOf", ()):
                if sections and "properties" in branch:
                    rows += _rows(branch, f"{prefix}{key}.", sections)
    return rows


def row(key: str, schema: Schema, *, required: bool, taken_by: str = "") -> str:
    """Return a key's row. taken_by: a sentence before its meaning."""
    default = (
        f"`{json.dumps(schema['default'])}`"
        if "default" in schema
        else "required"
        if required
        else "none"
    )
    meaning = str(schema.get("description", "")).removesuffix("Required.").strip() or str(
        schema.get("title", "")
    )
    return f"| `{key}` | {_cell(values(schema))} | {default} | {_cell(taken_by + meaning)} |"


def values(schema: Schema) -> str:
    """What may stand there, in words."""
    schema = merged(schema)
    if "enum" in schema:
        return ", ".join(f"`{_plain(v)}`" for v in schema["enum"])
    if "const" in schema:
        return f"`{_plain(schema['const'])}`"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(values(part) for part in schema["anyOf"]))
    kind = schema.get("type", "mapping" if "properties" in schema else "text")
    kinds = [kind] if isinstance(kind, str) else list(kind)
    return " or ".join(_type(k, schema) for k in kinds)


def _type(kind: str, schema: Schema) -> str:
    words = {
        "string": "text",
        "array": "list",
        "object": "mapping",
        "null": "nothing",
        "boolean": "true or false",
    }
    if kind not in ("integer", "number"):
        return words.get(kind, kind)
    bounds = {
        "minimum": "from",
        "exclusiveMinimum": "above",
        "maximum": "to",
        "exclusiveMaximum": "below",
    }
    limits = [f"{word} {schema[key]}" for key, word in bounds.items() if key in schema]
    return " ".join([kind, *limits])


def merged(schema: Schema) -> Schema:
    """With what its $ref says; its own words win."""
    if "$ref" not in schema:
        return schema
    return {**merged(recipe_schema_def(str(schema["$ref"]).rpartition("/")[2])), **schema}


def recipe_schema_def(name: str) -> Schema:
    return cast(Schema, cast(Schema, recipe_schema())["$defs"][name])


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")

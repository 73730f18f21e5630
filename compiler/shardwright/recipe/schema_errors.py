"""Validates a document against the schema, with messages in the recipe's words."""

from __future__ import annotations

import difflib
import itertools
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

from shardwright.diagnostics import Diagnostic, KeyPath, found
from shardwright.diagnostics.secret_values import MASK, is_secret_name
from shardwright.recipe.learning_rate_schedules import SCHEDULE_NAME_KEY, UNPLANNED_SCHEDULES
from shardwright.recipe.recipe_parser import INTEGER_HELP, LARGEST_INTEGER
from shardwright.recipe.recipe_schema import (
    FILL_IN,
    allowed_types,
    allows_other_keys,
    close_choices,
    describe_types,
    describe_value,
    dotted_key,
    fits_choice,
    has_allowed_type,
    join_with_or,
    path_of_synonym,
    paths_of_key,
    quote_text,
    recipe_schema,
    schema_items,
    schema_parts,
    schema_properties,
    type_names,
)
from shardwright.recipe.recipe_tree import yaml_scalar_value
from shardwright.utils.json_values import JsonObject, JsonValue

MAX_SUGGESTION_SEARCHES = 200
"""Bounds the unknown keys of one section for which a near name is searched: each costs a search."""
_NOT_FINITE = {"nan", "inf", "+inf", "-inf", "infinity", "+infinity", "-infinity"}


def schema_errors(document: JsonObject) -> tuple[Diagnostic, ...]:
    """Return every error with its key, without those that only follow from another."""
    found: dict[KeyPath | None, Diagnostic] = {}
    findings = [
        *_unfilled_values(document),
        *_value_errors(recipe_schema(), document, ()),
        *_unknown_keys(recipe_schema(), document, ()),
    ]
    # One a key, and the type first: what else is said of a value of the wrong type means little.
    for diagnostic in sorted(
        map(partial(_without_secret, document), findings),
        key=lambda d: ("SW1108", "SW1102", d.code).index(d.code),
    ):
        found.setdefault(diagnostic.key, diagnostic)
    intended = intended_keys(found.values())
    return tuple(d for d in found.values() if not (d.code == "SW1105" and d.key in intended))


def _without_secret(document: JsonObject, diagnostic: Diagnostic) -> Diagnostic:
    """Mask the value of a secret variable in an error."""
    key = diagnostic.key or ()
    if key[:2] != ("launch", "env") or not is_secret_name(str(key[-1])):
        return diagnostic
    value: JsonValue = document
    for name in map(str, key):
        value = value.get(name) if isinstance(value, Mapping) else None
    if not value or isinstance(value, Mapping | list):
        return diagnostic
    message, help = (
        text.replace(describe_value(value), MASK).replace(str(value), MASK)
        for text in (diagnostic.message, diagnostic.help)
    )
    return replace(diagnostic, message=message, help=help)


def intended_keys(findings: Iterable[Diagnostic]) -> set[KeyPath]:
    """Return the keys that unknown keys were meant to be: those are missing only because they are
    misspelt or misplaced."""
    unknown = [(d.key, near) for d in findings if d.code == "SW1101" and d.key for near in d.valid]
    return {tuple(near.split(".")) if "." in near else (*key[:-1], near) for key, near in unknown}


def _unfilled_values(value: JsonValue, path: KeyPath = ()) -> Iterator[Diagnostic]:
    if isinstance(value, Mapping):
        for key, below in value.items():
            yield from _unfilled_values(below, (*path, key))
    elif value == FILL_IN:
        message = f"{dotted_key(path)} is still to be filled in"
        yield found("SW1108", path, message, f"Write its value in place of {FILL_IN}.")


def _value_errors(schema: JsonObject, value: JsonValue, path: KeyPath) -> Iterator[Diagnostic]:
    """Yield the errors of a value by draft 2020-12, without those of unknown keys."""
    yield from _keyword_errors(schema, value, path)
    for part in schema_parts(schema, value):
        yield from _value_errors(part, value, path)
    branches = cast(Sequence[JsonObject], schema.get("anyOf", ()))
    errors = [tuple(_value_errors(branch, value, path)) for branch in branches]
    if errors and all(errors):
        yield from _any_of(branches, errors, value, path)
    if isinstance(value, Mapping):
        properties = cast(Mapping[str, JsonObject], schema.get("properties", {}))
        others, names = schema.get("additionalProperties"), schema.get("propertyNames")
        for key, below in value.items():
            if key in properties:
                yield from _value_errors(properties[key], below, (*path, key))
            elif isinstance(others, Mapping):
                yield from _value_errors(others, below, (*path, key))
            if isinstance(names, Mapping) and any(_value_errors(names, key, path)):
                what = f"{dotted_key(path)}: {quote_text(key)} is not {_rule(names)}"
                yield found("SW1106", (*path, key), what, _must(names))
    elif isinstance(value, list) and isinstance(items := schema.get("items"), Mapping):
        for index, item in enumerate(value):
            yield from _value_errors(items, item, (*path, index))


def _keyword_errors(schema: JsonObject, value: JsonValue, path: KeyPath) -> Iterator[Diagnostic]:
    """Yield the errors of a value by the keywords of this schema alone."""
    key = dotted_key(path)
    types = schema.get("type")
    allowed = {types} if isinstance(types, str) else set(cast(Sequence[str], types or ()))
    if allowed and not allowed & type_names(value):
        yield wrong_type(path, value, allowed)
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(choices, list) and not any(
        value == choice and isinstance(value, bool) == isinstance(choice, bool)
        for choice in choices
    ):
        yield _not_a_choice(path, value, choices)
    if isinstance(value, int | float) and not isinstance(value, bool):
        limits = {word: cast(float, schema[word]) for word in _RANGES if word in schema}
        if not all(_RANGES[word][1](value, limit) for word, limit in limits.items()):
            help = " and ".join(f"{_RANGES[word][0]} {limit}" for word, limit in limits.items())
            what = f"{key}: {describe_value(value)} is out of range"
            yield found("SW1104", path, what, f"Give a number {help}.")
    elif isinstance(value, str):
        pattern = schema.get("pattern")
        misfit = pattern is not None and re.search(str(pattern), value) is None
        excluded = schema.get("not")
        misfit |= isinstance(excluded, Mapping) and not any(_value_errors(excluded, value, path))
        shortest, longest = schema.get("minLength", 0), schema.get("maxLength", len(value))
        if misfit or not cast(int, shortest) <= len(value) <= cast(int, longest):
            what = f"{key}: {quote_text(value)} is not {_rule(schema)}"
            yield found("SW1106", path, what, _must(schema))
    elif isinstance(value, Mapping | list):
        kind = "Items" if isinstance(value, list) else "Properties"
        fewest = cast(int, schema.get(f"min{kind}", 0))
        most = cast(int, schema.get(f"max{kind}", len(value)))
        if not fewest <= len(value) <= most:
            bound = f"at least {fewest}" if len(value) < fewest else f"at most {most}"
            message = f"{key} has {len(value)} entries; it takes {bound}"
            yield found("SW1107", path, message, f"Give {bound}.")
        words = [x for x in value if isinstance(x, str)] if "uniqueItems" in schema else []
        if repeated := [word for word, times in Counter(words).items() if times > 1]:
            message = f"{key} has {quote_text(repeated[0])} more than once"
            yield found("SW1107", path, message, "Give each entry once.")
        if isinstance(value, Mapping):
            required = cast(Sequence[str], schema.get("required", ()))
            yield from (_missing(path, name, value) for name in required if name not in value)


def _any_of(
    branches: Sequence[JsonObject],
    errors: Sequence[tuple[Diagnostic, ...]],
    value: JsonValue,
    path: KeyPath,
) -> Iterator[Diagnostic]:
    """Yield the errors of the branches for this type of value; without one, all allowed types."""
    intended = [
        found
        for branch, found in zip(branches, errors, strict=True)
        if "const" not in branch and has_allowed_type(branch, value)
    ]
    if intended:
        yield from itertools.chain.from_iterable(intended)
        return
    words = [
        branch.get("enum", [branch["const"]] if "const" in branch else []) for branch in branches
    ]
    types = (allowed_types(branch) for branch, its in zip(branches, words, strict=True) if not its)
    choices = tuple(str(word) for its in words for word in cast(Sequence[JsonValue], its))
    yield wrong_type(path, value, set().union(*types), choices)


def wrong_type(
    path: KeyPath, value: JsonValue, wanted: set[str], choices: tuple[str, ...] = ()
) -> Diagnostic:
    """Make SW1102, or SW1013 for a NaN. choices: allowed texts, such as auto."""
    expected = " or ".join((*(f"`{c}`" for c in choices), *describe_types(wanted)))
    numeric = bool(wanted & {"integer", "number"})
    if isinstance(value, str) and numeric and value.lower() in _NOT_FINITE:
        return found(
            "SW1013",
            path,
            f"{dotted_key(path)}: {value} is not a finite number",
            "Write a finite number.",
        )
    help = f"Give {expected}."
    if isinstance(value, str):
        plain = value.strip().replace("_", "").replace(",", "")
        number = yaml_scalar_value(plain)
        if numeric and isinstance(number, int | float) and not isinstance(number, bool):
            help = f"Write {plain} without quotes." if plain == value.strip() else f"Write {plain}."
        elif wanted == {"boolean"} and value.lower() in _BOOLEANS:
            help = f"Write {_BOOLEANS[value.lower()]}; in YAML 1.2 {value} is text."
        elif wanted == {"array"}:
            help = f"Write [{value}]."
        elif choices and (close := close_choices(value, choices)):
            help = f"Did you mean `{close[0]}`?"
    elif "string" in wanted and isinstance(value, bool | int | float):
        help = f'Write "{describe_value(value)}" in quotes.'
    elif "array" in wanted:
        help = (
            f"Give a list, such as [{describe_value(value)}]."
            if not isinstance(value, Mapping)
            else "Give a list."
        )
    help = _TYPE_HELP.get(path, help)
    return found(
        "SW1102",
        path,
        f"{dotted_key(path)}: expected {expected}, got {describe_value(value, typed=True)}",
        help,
        choices,
    )


_TYPE_HELP: dict[KeyPath, str] = {
    (
        "model",
        "trust_remote_code",
    ): "Write the model's name, the same as model.source: `trust_remote_code: org/name`. "
    "Without the key no code of a model's own runs.",
    (
        "training",
        "objective",
    ): "Write its name in a mapping, such as `objective: {name: dpo}`; what "
    "the search minimizes, time or cost, is `objective` at the top of the recipe.",
    ("training", "optimizer"): "Write its name in a mapping, such as `optimizer: {name: adamw}`.",
    ("training", "scheduler"): "Write its name in a mapping, such as `scheduler: {name: cosine}`.",
}

_BOOLEANS = {
    **dict.fromkeys(("yes", "on", "true"), "true"),
    **dict.fromkeys(("no", "off", "false"), "false"),
}


def _not_a_choice(path: KeyPath, value: JsonValue, choices: list[JsonValue]) -> Diagnostic:
    valid = [str(choice) for choice in choices]
    if isinstance(value, Mapping | list):
        return wrong_type(path, value, {"string"})
    if path == SCHEDULE_NAME_KEY and (why := UNPLANNED_SCHEDULES.get(str(value))):
        return found(
            "SW1103",
            path,
            f"{dotted_key(path)}: {describe_value(value)} {why}, so no plan holds its rates",
            f"Write a schedule that is known before the run: {join_with_or(valid)}.",
            tuple(valid),
        )
    close = close_choices(str(value), valid)
    help = f"Did you mean `{close[0]}`?" if close else f"Write {join_with_or(valid)}."
    if path == ("version",):
        help = "Write `version: 1`; this is the only format that this shardwright reads."
    return found(
        "SW1103",
        path,
        f"{dotted_key(path)}: {describe_value(value)} is not {join_with_or(valid)}",
        help,
        tuple(close or valid),
    )


def _missing(path: KeyPath, key: str, value: JsonObject) -> Diagnostic:
    where = f" in `{dotted_key(path)}`" if path else ""
    schema = recipe_schema()
    for part in path:  # approximate, as only the last mapping's value is known
        schema = (
            schema_items(schema, [value])
            if isinstance(part, int)
            else schema_properties(schema, value).get(part, {})
        )
    known = schema_properties(schema, value).get(key, {})
    what = str(known.get("description", "")).removesuffix("Required.").strip() or str(
        known.get("title", "")
    )
    return found(
        "SW1105", (*path, key), f"`{key}` is missing{where}", f"Add `{key}:`. {what}".strip()
    )


def _unknown_keys(schema: JsonObject, value: JsonValue, path: KeyPath) -> Iterator[Diagnostic]:
    """Yield SW1101 for keys that no applicable part of the schema has."""
    if isinstance(value, Mapping):
        known = schema_properties(schema, value)
        # Without a good `kind`, the keys that would go with it are unknown to us.
        unsure = "kind" in known and not fits_choice(known["kind"], value.get("kind"))
        closed = bool(known) and not (unsure or allows_other_keys(schema, value))
        count = 0
        for key, below in value.items():
            if key in known:
                yield from _unknown_keys(known[key], below, (*path, key))
            elif closed:
                count += 1
                yield _unknown(path, key, tuple(known), search=count <= MAX_SUGGESTION_SEARCHES)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _unknown_keys(schema_items(schema, value), item, (*path, index))


def _unknown(path: KeyPath, key: str, known: tuple[str, ...], *, search: bool) -> Diagnostic:
    where = f"in `{dotted_key(path)}`" if path else "at the top of the recipe"
    close = tuple(difflib.get_close_matches(key.lower(), known, n=1, cutoff=0.6)) if search else ()
    intended = path_of_synonym(key)
    if intended is not None and intended[:-1] == path:
        close, elsewhere = (intended[-1],), []
    elif intended is not None:
        close, elsewhere = (), [intended]
    else:
        elsewhere = [place for place in paths_of_key(key) if place[:-1] != path][:2]
    help = f"Did you mean `{close[0]}`?" if close else ""
    if elsewhere:
        help += (
            " "
            + " or ".join(
                f"`{name}` belongs under `{'.'.join(parents)}`"
                if parents
                else f"`{name}` belongs at the top of the recipe"
                for *parents, name in elsewhere
            )
            + "."
        )
    help = help.strip() or f"The keys here are {', '.join(known)}."
    valid = (*close, *(".".join(place) for place in elsewhere))
    return found("SW1101", (*path, key), f"unknown key `{key}` {where}", help, valid)


_RANGES: dict[str, tuple[str, Callable[[float, float], bool]]] = {
    "minimum": ("at least", operator.ge),
    "exclusiveMinimum": ("above", operator.gt),
    "maximum": ("at most", operator.le),
    "exclusiveMaximum": ("below", operator.lt),
}


def _rule(schema: JsonObject) -> str:
    return str(schema.get("$comment", "allowed here"))


def _must(schema: JsonObject) -> str:
    return f"Give {schema['$comment']}." if "$comment" in schema else "Give some text."


def integer_errors(document: JsonValue, path: KeyPath = ()) -> Iterator[Diagnostic]:
    """Yield SW1014 for floats that became integers beyond 2^53 (tokens: 1e300) in a completed
    document."""
    if isinstance(document, Mapping):
        for key, value in document.items():
            yield from integer_errors(value, (*path, key))
    elif isinstance(document, list):
        for index, value in enumerate(document):
            yield from integer_errors(value, (*path, index))
    elif (
        isinstance(document, int)
        and not isinstance(document, bool)
        and abs(document) > LARGEST_INTEGER
    ):
        yield found(
            "SW1014",
            path,
            (
                f"{dotted_key(path)}: {float(document):g} is beyond 2^53, the largest integer of "
                "a recipe"
            ),
            INTEGER_HELP,
        )

"""Stage 1, whole: a file and the command line's --set -> Recipe, or every error in them at once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from shardwright.diagnostics import Diagnostic, KeyPath, Location, Refusal, Source
from shardwright.recipe.auto_values import build_recipe, recipe_directory, resolve_auto
from shardwright.recipe.cross_key_checks import cross_key_errors
from shardwright.recipe.recipe_composition import STDIN, RecipeComposer
from shardwright.recipe.recipe_nodes import Node, node_locations, node_value
from shardwright.recipe.recipe_schema import fill_in_defaults, recipe_schema
from shardwright.recipe.recipe_types import Recipe
from shardwright.recipe.schema_errors import integer_errors, intended_keys, schema_errors
from shardwright.utils.json_types import JsonObject


def load_recipe(
    path: Path, overrides: Sequence[str] = (), *, stdin_text: str | None = None
) -> Recipe:
    """`path` "-" is standard input. Raises Refusal, with the source to show, for anything wrong in
    the recipe.

    Looks at the disk only for the recipe, its bases, `cluster.measured`, and whether a model source
    or tokenizer is a folder; whether the other files that it names are there is files.check_files's
    question, because an estimate needs none of them.
    """
    name = STDIN if str(path) == "-" else str(path)
    directory = os.getcwd() if name == STDIN else recipe_directory(name)
    layers = RecipeComposer(stdin_text)
    root = layers.read_file(name, directory)
    if root is not None:
        root = layers.override(root, overrides)
    if root is None:
        raise Refusal(*layers.errors, source=Source(file=name, texts=layers.texts))
    source = _source(name, root, layers.texts)
    return recipe_from_document(
        cast(JsonObject, node_value(root)), directory, source, layers.errors
    )


MISSING_BASE_CODES = ("SW1021", "SW1022")
"""`extends` goes round, or names what cannot be read."""


def recipe_from_document(
    given: JsonObject, directory: str, source: Source, errors: Sequence[Diagnostic] = ()
) -> Recipe:
    """The document as it was written -> Recipe. errors: what reading it has found already."""
    found = list(errors)
    reported_keys = _keys_at(source, [error.location for error in errors])
    found += [error for error in schema_errors(given) if error.key not in reported_keys]
    completed = cast(JsonObject, fill_in_defaults(recipe_schema(), given))
    reported_keys |= {error.key for error in found if error.key is not None}
    found += [error for error in integer_errors(completed) if error.key not in reported_keys]
    faulty_keys = reported_keys | {error.key for error in found if error.key}
    # What a misspelt key was meant to be is unknown too.
    faulty_keys |= intended_keys(found)
    found += cross_key_errors(completed, faulty_keys)
    if any(error.code in MISSING_BASE_CODES for error in errors):  # what is missing may stand there
        found = [error for error in found if error.code != "SW1105"]
    if found:
        raise Refusal(*sorted(found, key=lambda e: _order(e, source)), source=source)
    return build_recipe(resolve_auto(completed), directory, source)


def _source(name: str, root: Node, texts: dict[str, str]) -> Source:
    values: dict[KeyPath, Location] = {}
    keys: dict[KeyPath, Location] = {}
    for path, value_place, key_place in node_locations(root):
        values[path] = value_place
        if key_place is not None:
            keys[path] = key_place
    return Source(file=name, locations=values, key_locations=keys, texts=texts)


def _keys_at(source: Source, faulty_keys: list[Location | None]) -> set[KeyPath]:
    """The keys whose value, or own name, already has a finding."""
    spots = {(place.file, place.line, place.column) for place in faulty_keys if place is not None}
    both = (*source.locations.items(), *source.key_locations.items())
    return {
        path for path, place in both if path and (place.file, place.line, place.column) in spots
    }


def _order(error: Diagnostic, source: Source) -> tuple[int, str, int, int]:
    """By place: the recipe first, then its bases, then the command line."""
    place, key = error.location, error.key
    while place is None and key is not None:
        place = source.key_locations.get(key) or source.locations.get(key)
        key = key[:-1] if key else None
    place = place or Location(file=source.file, line=0, column=0)
    return (
        (place.file != source.file) + place.file.startswith("--"),
        place.file,
        place.line,
        place.column,
    )

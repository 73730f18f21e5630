"""Loads a recipe: a file and the command line's --set give a Recipe, or all their errors at
once."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from shardwright.diagnostics import Diagnostic, KeyPath, Location, Refusal, Source, refusal
from shardwright.recipe.cross_key_checks import cross_key_errors
from shardwright.recipe.island_keys import single_island_document, with_outer_defaults
from shardwright.recipe.measurements import (
    MEASURED_FILE,
    MeasuredValue,
    Measurements,
    MeasurementsFile,
)
from shardwright.recipe.recipe_composition import (
    STDIN,
    RecipeComposer,
    absolute_dataset_path,
    absolute_path,
    is_folder,
)
from shardwright.recipe.recipe_schema import fill_in_defaults, quote_text, recipe_schema
from shardwright.recipe.recipe_tree import Node, node_value, walk_tree
from shardwright.recipe.recipe_types import Recipe, with_resolved_kernels
from shardwright.recipe.sbatch_options import sbatch_arguments
from shardwright.recipe.schema_errors import integer_errors, intended_keys, schema_errors
from shardwright.utils.file_io import parse_json, read_regular_file
from shardwright.utils.json_records import read_record
from shardwright.utils.json_values import JsonObject, JsonValue

KEY: KeyPath = ("cluster", "measured")
MOST_BYTES = 4 * 2**20
_MEASURE_HELP = (
    "`shardwright calibrate RECIPE -o FILE` writes one; `shardwright tune` adds runs to it."
)


def read_measured(named: JsonValue, directory: str) -> MeasurementsFile:
    """Read the file of `cluster.measured` strictly. named: its value, a path or {file, sha256}.
    Raises Refusal with SW1301, SW1302 or SW1303."""
    document = named if isinstance(named, Mapping) else {"file": named}
    path, expected_sha256 = absolute_path(str(document["file"]), directory), document.get("sha256")
    try:
        content = read_regular_file(path, MOST_BYTES)
    except FileNotFoundError:
        why = f"cluster.measured: the file {quote_text(path, 200)} does not exist"
        help = f"Relative paths start at the recipe's folder. {_MEASURE_HELP}"
        raise refusal("SW1301", why, help, KEY) from None
    except OSError as error:
        raise _unusable(path, str(error.strerror)) from None
    digest = hashlib.sha256(content).hexdigest()
    if expected_sha256 not in (None, digest):
        raise refusal(
            "SW1303",
            (
                f"cluster.measured: {quote_text(path, 200)} is not the file that its sha256 "
                "says: it "
                f"begins {digest[:12]}"
            ),
            "Name the file alone to take it as it is, or put the measured one back.",
            KEY,
        )
    return MeasurementsFile(path=path, sha256=digest, content=content, found=_parsed(path, content))


def measurements_entry(measured: MeasurementsFile) -> JsonObject:
    """Return `cluster.measured` for the resolved recipe: by content, not by path, as the recipe's
    hash needs it."""
    return {"file": MEASURED_FILE, "sha256": measured.sha256}


def _parsed(path: str, content: bytes) -> Measurements:
    try:
        document = parse_json(content)
    except ValueError as error:
        raise _unusable(path, f"it is not JSON: {error}") from None
    try:
        found = read_record(Measurements, document)
    except ValueError as error:
        raise _unusable(path, str(error)) from None
    if wrong := next(_invalid_numbers(found, ""), ""):
        raise _unusable(path, wrong)
    return found


def _invalid_numbers(value: Any, place: str) -> Iterator[str]:
    """Yield "path is value" for numbers that no measurement gives, such as NaN or a negative
    time."""
    if isinstance(value, int | float):
        if not (math.isfinite(value) and value >= 0):
            yield f"{place} is {value!r}"
    elif isinstance(value, MeasuredValue) and value.n < 1:
        yield f"{place}.n is {value.n}"
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _invalid_numbers(
                getattr(value, field.name), f"{place}.{field.name}".lstrip(".")
            )
            if field.name in _ABOVE_ZERO and not _number(getattr(value, field.name)) > 0:
                yield f"{place}.{field.name} is not above 0".lstrip(".")
    elif isinstance(value, tuple):
        for i, item in enumerate(value):
            yield from _invalid_numbers(item, f"{place}[{i}]")
    elif hasattr(value, "items"):
        for key, item in value.items():
            yield from _invalid_numbers(item, f"{place}.{key}")


_ABOVE_ZERO = (
    *("predicted_step_seconds", "forward_seconds", "cores", "nodes", "ranks", "threads", "tensor"),
    *("micro_batch_size", "sequence_length"),
)


def _number(value: Any) -> float:
    return float(value.value if isinstance(value, MeasuredValue) else value)


def _unusable(path: str, why: str) -> Refusal:
    return Refusal(
        Diagnostic(
            code="SW1302",
            message=(
                f"cluster.measured: {quote_text(os.path.normpath(path), 200)} is no file of "
                "measurements: "
            )
            + " ".join(why.split())[:300],
            help=_MEASURE_HELP,
            key=KEY,
        )
    )


_KINDS_OF_TOKEN_IDS = ("tokens", "megatron", "synthetic")
Section = dict[str, JsonValue]


def recipe_directory(name: str) -> str:
    """Return the folder that relative paths start from; the working folder for standard input."""
    return os.path.dirname(os.path.abspath(name))


def resolve_auto(document: JsonObject) -> JsonObject:
    """Resolve the `auto` values that depend on another key: starting weights and tokenizers. Keys
    at a default that older recipes lack are dropped, so that both have one hash."""
    resolved_document = dict(document)
    model = dict(cast(JsonObject, document["model"]))
    if model["weights"] == "auto":
        model["weights"] = "random" if model["source"] is None else "pretrained"
    if model.get("kernels") == "hf":  # said or left out, it is the same recipe
        del model["kernels"]
    if model.get("task") == "auto":
        del model["task"]
    resolved_document["model"] = model
    for section in ("data", "validation"):
        if resolved_document.get(section) is not None:
            data = _with_tokenizer(
                cast(JsonObject, resolved_document[section]), cast("str | None", model["source"])
            )
            resolved_document[section] = _without_auto_bos(data)
    cluster = cast(JsonObject, document["cluster"])
    if cluster.get("measured", "") is None:  # said or left out, it is the same recipe
        resolved_document["cluster"] = {
            key: value for key, value in cluster.items() if key != "measured"
        }
    resolved_document.pop("extends", None)  # merged
    return with_outer_defaults(resolved_document)


def with_measured_checkpoint_rate(recipe: Recipe, gbytes_per_second: float) -> Recipe:
    """Set cluster.checkpoint_gbytes_per_second to a measured rate, in four digits, as if the recipe
    gave it."""
    value = float(f"{gbytes_per_second:.4g}")
    section = {
        **cast(JsonObject, recipe.document["cluster"]),
        "checkpoint_gbytes_per_second": value,
    }
    return replace(
        recipe,
        cluster=replace(recipe.cluster, checkpoint_gbytes_per_second=value),
        document={**recipe.document, "cluster": section},
    )


def _without_auto_bos(data: JsonObject) -> JsonObject:
    """Drop `add_bos_token: auto`, so that a recipe with it and one without are equal."""
    if "mixture" in data:
        parts = cast("list[JsonObject]", data["mixture"])
        return {**data, "mixture": [_without_auto_bos(part) for part in parts]}
    return {key: value for key, value in data.items() if (key, value) != ("add_bos_token", "auto")}


def _with_tokenizer(data: JsonObject, source: str | None) -> JsonObject:
    if "mixture" in data:
        parts = cast("list[JsonObject]", data["mixture"])
        return {**data, "mixture": [_with_tokenizer(part, source) for part in parts]}
    if data.get("tokenizer") != "auto":
        return data
    return {
        **data,
        "tokenizer": None if data.get("kind") in _KINDS_OF_TOKEN_IDS else source or "byte",
    }


def build_recipe(document: JsonObject, directory: str, source: Source) -> Recipe:
    """Build the Recipe of one island from a valid, completed document. directory: absolute folder
    of the recipe file. Raises Refusal for `cluster.measured`, whose figures are part of the
    recipe."""
    document, measured = _with_measured(document, directory, source)
    resolved = dict(single_island_document(document))
    for key, resolve in _SECTIONS.items():
        if resolved[key] is not None:
            resolved[key] = resolve(dict(cast(JsonObject, resolved[key])), directory)
    resolved["cluster"] = {
        k: v for k, v in cast(JsonObject, resolved["cluster"]).items() if k != "measured"
    }
    recipe = read_record(
        Recipe, {**resolved, "directory": directory, "document": document, "source": source}
    )
    recipe = dataclasses.replace(
        recipe, cluster=dataclasses.replace(recipe.cluster, measured=measured)
    )
    return with_resolved_kernels(recipe, "compile") if recipe.model.kernels == "compile" else recipe


def _with_measured(
    document: JsonObject, directory: str, source: Source
) -> tuple[JsonObject, MeasurementsFile | None]:
    """Return the document with the measurements' digest in it, and the measurements."""
    cluster = cast(JsonObject, document["cluster"])
    if "measured" not in cluster:
        return document, None
    try:
        measured = read_measured(cluster["measured"], directory)
    except Refusal as refusal:
        raise Refusal(*refusal.diagnostics, source=source) from None
    return {**document, "cluster": {**cluster, "measured": measurements_entry(measured)}}, measured


def _model(model: Section, directory: str) -> Section:
    names = {key: _folder_or_name(model[key], directory) for key in ("source", "trust_remote_code")}
    balance = model.get("router_aux_loss", "off")
    return {**model, **names, "router_aux_loss": None if balance == "off" else balance}


def _without_auto(section: Section, _: str = "") -> Section:
    return {key: None if value == "auto" else value for key, value in section.items()}


def _cluster(cluster: Section, _: str) -> Section:
    return {**_without_auto(cluster), "gpu": cluster["gpu"]}  # a name


def _training(training: Section, _: str) -> Section:
    scheduler = dict(cast(JsonObject, training["scheduler"]))
    # Neither of a pair: no warm-up, and down to zero.
    for key, ratio in (("warmup_steps", "warmup_ratio"), ("min_lr", "min_lr_ratio")):
        if scheduler[key] is None and scheduler[ratio] is None:
            scheduler[key] = 0
    return {**_without_auto(training), "scheduler": scheduler}


def _data(data: Section, directory: str) -> Section:
    """Make the paths of a data section absolute, a mixture's parts included, and add the keys that
    its kind lacks."""
    resolved = {
        "kind": "mixture",
        "path": None,
        "tokenizer": None,
        "packing": True,
        "shuffle": True,
    } | data
    if resolved["path"] is not None:
        resolved["path"] = absolute_dataset_path(
            str(resolved["path"]), directory, str(resolved["kind"])
        )
    resolved["tokenizer"] = _folder_or_name(resolved["tokenizer"], directory)
    images = cast("JsonObject | None", resolved.get("images"))
    if images is not None and images.get("folder") is not None:
        resolved["images"] = {**images, "folder": absolute_path(str(images["folder"]), directory)}
    if "mixture" in data:
        resolved["mixture"] = [
            _data(dict(part), directory) for part in cast("list[JsonObject]", data["mixture"])
        ]
    return resolved


def _validation(validation: Section, directory: str) -> Section:
    own = {key: validation.pop(key) for key in ("every_steps", "fraction")}
    return {**own, "data": _data(validation, directory) if "kind" in validation else None}


def _parallelism(parallelism: Section, _: str) -> Section:
    return _without_auto(parallelism)


def _launch(launch: Section, directory: str) -> Section:
    paths = {
        k: None if launch[k] is None else absolute_path(str(launch[k]), directory)
        for k in ("hostfile", "setup_script")
    }
    slurm = (
        launch["slurm"]
        if launch["slurm"] is None
        else _slurm(dict(cast(JsonObject, launch["slurm"])))
    )
    env: JsonValue = [list(pair) for pair in cast(JsonObject, launch["env"]).items()]
    return {
        **_without_auto(launch),
        "launcher": launch["launcher"],
        "env": env,
        **paths,
        "slurm": slurm,
    }


def _slurm(slurm: Section) -> Section:
    whole = "0" if slurm["exclusive"] else None
    mem = whole if slurm["mem"] == "auto" else str(slurm["mem"])
    return {
        **slurm,
        "mem": mem,
        "extra": list(sbatch_arguments(slurm["extra"])),
        "container": _container(slurm["container"]),
    }


def _container(container: JsonValue) -> JsonValue:
    if container is None:
        return None
    mounts = cast("list[str]", cast(JsonObject, container)["mounts"])
    return {
        **cast(JsonObject, container),
        "mounts": [mount if ":" in mount else f"{mount}:{mount}" for mount in mounts],
    }


def _folder_or_name(value: JsonValue, directory: str) -> str | None:
    if value is None:
        return None
    text = cast(str, value)
    return absolute_path(text, directory) if is_folder(text, directory) else text


_SECTIONS: dict[str, Callable[[Section, str], Section]] = {
    "model": _model,
    "cluster": _cluster,
    "training": _training,
    "data": _data,
    "validation": _validation,
    "parallelism": _parallelism,
    "launch": _launch,
    "lora": _without_auto,
}


def load_recipe(
    path: Path, overrides: Sequence[str] = (), *, stdin_text: str | None = None
) -> Recipe:
    """Load a recipe; `path` "-" is standard input. Raises Refusal with every error in the recipe.

    Reads only the recipe, its bases and `cluster.measured`, and asks whether a model source or
    tokenizer is a folder. check_files looks for the other files: an estimate needs none of them.
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
"""Lists the codes of an `extends` that is a cycle or cannot be read."""


def recipe_from_document(
    given: JsonObject, directory: str, source: Source, errors: Sequence[Diagnostic] = ()
) -> Recipe:
    """Check a document as written, and build its Recipe. errors: found while reading it."""
    found = list(errors)
    reported_keys = _keys_at(source, [error.location for error in errors])
    misfits = schema_errors(given)
    found += [error for error in misfits if error.key not in reported_keys]
    completed = cast(JsonObject, fill_in_defaults(recipe_schema(), given))
    reported_keys |= {error.key for error in found if error.key is not None}
    found += [error for error in integer_errors(completed) if error.key not in reported_keys]
    faulty_keys = reported_keys | {error.key for error in found if error.key}
    # What a misspelt key was meant to be is unknown too.
    faulty_keys |= intended_keys(misfits)
    found += cross_key_errors(completed, faulty_keys)
    if any(error.code in MISSING_BASE_CODES for error in errors):  # what is missing may stand there
        found = [error for error in found if error.code != "SW1105"]
    if found:
        raise Refusal(*sorted(found, key=lambda e: _order(e, source)), source=source)
    return build_recipe(resolve_auto(completed), directory, source)


def _source(name: str, root: Node, texts: dict[str, str]) -> Source:
    tree = list(walk_tree(root))
    values = {path: node.location for path, _, node in tree}
    keys = {path: key.location for path, key, _ in tree if key is not None}
    return Source(file=name, locations=values, key_locations=keys, texts=texts)


def _keys_at(source: Source, faulty_keys: list[Location | None]) -> set[KeyPath]:
    """Return the keys whose value or name already has an error."""
    spots = {(place.file, place.line, place.column) for place in faulty_keys if place is not None}
    both = (*source.locations.items(), *source.key_locations.items())
    return {
        path for path, place in both if path and (place.file, place.line, place.column) in spots
    }


def _order(error: Diagnostic, source: Source) -> tuple[int, str, int, int]:
    """Return a sort key by place: the recipe first, then its bases, then the command line."""
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

"""Loads a recipe: a file and the command line's --set give a Recipe, or all their errors at
once."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
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
from shardwright.recipe.objectives import (
    OBJECTIVES,
    PREFERENCE_KIND,
    ObjectiveTraits,
    with_objective_defaults,
    without_null_objective_keys,
)
from shardwright.recipe.optimizer_keys import (
    optimizer_key_errors,
    with_optimizer_defaults,
    without_other_optimizers_keys,
)
from shardwright.recipe.recipe_composition import (
    STDIN,
    RecipeComposer,
    absolute_dataset_path,
    absolute_path,
    is_folder,
)
from shardwright.recipe.recipe_schema import fill_in_defaults, quote_text, recipe_schema
from shardwright.recipe.recipe_tree import node_value, walk_tree
from shardwright.recipe.recipe_types import Recipe, with_resolved_kernels
from shardwright.recipe.sbatch_options import sbatch_arguments
from shardwright.recipe.schema_errors import integer_errors, intended_keys, schema_errors
from shardwright.utils.file_io import parse_json, read_regular_file
from shardwright.utils.json_values import JsonObject, JsonValue, read_record

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
        message = (
            f"cluster.measured: {quote_text(path, 200)} has another sha256 than the recipe gives; "
            f"the file's begins with {digest[:12]}"
        )
        help = "Name the file without a sha256 to take it as it is, or restore the measured file."
        raise refusal("SW1303", message, help, KEY)
    try:
        parsed = parse_json(content)
    except ValueError as error:
        raise _unusable(path, f"not JSON: {error}") from None
    try:
        measurements = read_record(Measurements, parsed)
        if wrong := next(_invalid_numbers(measurements, ""), ""):
            raise ValueError(wrong)
    except ValueError as error:
        raise _unusable(path, str(error)) from None
    return MeasurementsFile(path=path, sha256=digest, content=content, found=measurements)


def measurements_entry(measured: MeasurementsFile) -> JsonObject:
    """Return `cluster.measured` for the resolved recipe: by content, not by path, as the recipe's
    hash needs it."""
    return {"file": MEASURED_FILE, "sha256": measured.sha256}


def _invalid_numbers(value: Any, place: str) -> Iterator[str]:
    """Yield "path is value" for numbers that no measurement gives, such as NaN or a negative
    time."""
    if isinstance(value, int | float):
        if not 0 <= value <= _MOST_MEASURED:
            yield f"{place} is {value!r}"
    elif isinstance(value, MeasuredValue) and value.n < 1:
        yield f"{place}.n is {value.n}"
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _invalid_numbers(
                getattr(value, field.name), f"{place}.{field.name}".lstrip(".")
            )
            number = getattr(value, field.name)
            number = number.value if isinstance(number, MeasuredValue) else number
            if field.name in _ABOVE_ZERO and not number > 0:
                yield f"{place}.{field.name} is not above 0".lstrip(".")
    elif isinstance(value, tuple):
        for i, item in enumerate(value):
            yield from _invalid_numbers(item, f"{place}[{i}]")
    elif hasattr(value, "items"):
        for key, item in value.items():
            yield from _invalid_numbers(item, f"{place}.{key}")


_MOST_MEASURED = 1e30  # of bytes, operations or seconds; squares of it are still finite
_ABOVE_ZERO = (
    *("predicted_step_seconds", "forward_seconds", "cores", "nodes", "ranks", "threads", "tensor"),
    *("micro_batch_size", "sequence_length"),
)


def _unusable(path: str, why: str) -> Refusal:
    shown = quote_text(os.path.normpath(path), 200)
    message = f"cluster.measured: {shown} is not a measurements file: {' '.join(why.split())[:300]}"
    return refusal("SW1302", message, _MEASURE_HELP, KEY)


Section = dict[str, JsonValue]


def resolve_auto(document: JsonObject) -> JsonObject:
    """Resolve the `auto` values that depend on another key: starting weights and tokenizers. Keys
    that the optimizer or the objective does not take are left out: a recipe may not have them."""
    resolved_document = dict(document)
    model = dict(cast(JsonObject, document["model"]))
    if model["weights"] == "auto":
        model["weights"] = "random" if model["source"] is None else "pretrained"
    resolved_document["model"] = model
    for section in ("data", "validation"):
        if resolved_document.get(section) is not None:
            resolved_document[section] = _resolved_data(
                cast(JsonObject, resolved_document[section]), cast("str | None", model["source"])
            )
    resolved_document["training"] = without_null_objective_keys(
        without_other_optimizers_keys(cast(JsonObject, resolved_document["training"]))
    )
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


def _resolved_data(data: JsonObject, source: str | None) -> JsonObject:
    """Resolve `tokenizer: auto`."""
    if "mixture" in data:
        parts = cast("list[JsonObject]", data["mixture"])
        return {**data, "mixture": [_resolved_data(part, source) for part in parts]}
    if data.get("tokenizer") != "auto":
        return data
    has_ids = data.get("kind") in ("tokens", "megatron", "synthetic")
    return {**data, "tokenizer": None if has_ids else source or "byte"}


def build_recipe(document: JsonObject, directory: str, source: Source) -> Recipe:
    """Build the Recipe of one island from a valid, completed document. directory: absolute folder
    of the recipe file. Raises Refusal for `cluster.measured`, whose figures are part of the
    recipe."""
    measured = None
    cluster = cast(JsonObject, document["cluster"])
    if cluster["measured"] is not None:
        try:
            measured = read_measured(cluster["measured"], directory)
        except Refusal as refusal:
            raise Refusal(*refusal.diagnostics, source=source) from None
        cluster = {**cluster, "measured": measurements_entry(measured)}
        document = {**document, "cluster": cluster}
    fields = _record_fields(single_island_document(document), directory)
    recipe = read_record(
        Recipe, {**fields, "directory": directory, "document": document, "source": source}
    )
    recipe = replace(recipe, cluster=replace(recipe.cluster, measured=measured))
    return with_resolved_kernels(recipe, "compile") if recipe.model.kernels == "compile" else recipe


def _record_fields(document: JsonObject, directory: str) -> Section:
    """Convert a document to the fields of Recipe: paths become absolute, and `auto` None."""

    def section(key: str) -> Section | None:
        return None if document[key] is None else dict(cast(JsonObject, document[key]))

    model, cluster, training, parallelism, launch = (
        cast(Section, section(key))
        for key in ("model", "cluster", "training", "parallelism", "launch")
    )
    for key in ("source", "trust_remote_code"):
        model[key] = _folder_or_name(model[key], directory)
    if model["router_aux_loss"] == "off":
        model["router_aux_loss"] = None
    del cluster["measured"]  # build_recipe reads it
    scheduler = dict(cast(JsonObject, training["scheduler"]))
    # Neither of a pair: no warm-up, and down to zero.
    for key, ratio in (("warmup_steps", "warmup_ratio"), ("min_lr", "min_lr_ratio")):
        if scheduler[key] is None and scheduler[ratio] is None:
            scheduler[key] = 0
    data, validation, lora = section("data"), section("validation"), section("lora")
    objective = dict(cast(JsonObject, training["objective"]))
    traits = OBJECTIVES[str(objective["name"])]
    if validation is not None:
        own = {key: validation.pop(key) for key in ("every_steps", "fraction")}
        validation = {
            **own,
            "data": _data(validation, directory, traits) if "kind" in validation else None,
        }
    for key in ("hostfile", "setup_script"):
        if launch[key] is not None:
            launch[key] = absolute_path(str(launch[key]), directory)
    for key in ("reference", "reference_model", "teacher"):
        if isinstance(path := objective.get(key), str):
            objective[key] = absolute_path(path, directory)
    if data is not None and traits.compares_pairs and _packs(data):
        objective["packed"] = True
    training["objective"] = objective
    if launch["slurm"] is not None:
        slurm = dict(cast(JsonObject, launch["slurm"]))
        whole_node = "0" if slurm["exclusive"] else None
        slurm["mem"] = whole_node if slurm["mem"] == "auto" else str(slurm["mem"])
        slurm["extra"] = list(sbatch_arguments(slurm["extra"]))
        if (container := cast("JsonObject | None", slurm["container"])) is not None:
            mounts = cast("list[str]", container["mounts"])
            full = [mount if ":" in mount else f"{mount}:{mount}" for mount in mounts]
            slurm["container"] = {**container, "mounts": full}
        launch["slurm"] = slurm
    if (recovery := cast("Section | None", launch["recovery"])) is not None:
        launch["recovery"] = _without_auto(recovery)
    env: JsonValue = [list(pair) for pair in cast(JsonObject, launch["env"]).items()]
    return {
        **document,
        "model": model,
        "cluster": {**_without_auto(cluster), "gpu": cluster["gpu"]},  # a name
        "training": {**_without_auto(training), "scheduler": scheduler},
        "data": None if data is None else _data(data, directory, traits),
        "validation": validation,
        "parallelism": _without_auto(parallelism),
        "launch": {**_without_auto(launch), "launcher": launch["launcher"], "env": env},
        "assume": {
            key: None if (key, value) == ("expert_imbalance", "auto") else value
            for key, value in cast(JsonObject, document["assume"]).items()
        },
        "lora": None if lora is None else _without_auto(lora),
    }


def _without_auto(section: Section) -> Section:
    return {key: None if value == "auto" else value for key, value in section.items()}


def _packs(data: JsonObject) -> bool:
    """Return whether pairs are packed, in all parts of a mixture or in none."""
    parts = cast("list[JsonObject]", data.get("mixture") or [data])
    return any(part.get("packing") is True for part in parts)


def _data(data: Section, directory: str, traits: ObjectiveTraits) -> Section:
    """Make the paths of a data section absolute, a mixture's parts included, and add the keys that
    its kind lacks."""
    is_preference = data.get("kind") == PREFERENCE_KIND
    resolved = {
        "kind": "mixture",
        "path": None,
        "tokenizer": None,
        "packing": not is_preference,
        "shuffle": True,
        "labelled": traits.reads_labels and is_preference,
        "scored": traits.scores_sequences and is_preference,
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
            _data(dict(part), directory, traits)
            for part in cast("list[JsonObject]", data["mixture"])
        ]
    return resolved


def _folder_or_name(value: JsonValue, directory: str) -> str | None:
    if value is None:
        return None
    text = cast(str, value)
    return absolute_path(text, directory) if is_folder(text, directory) else text


def load_recipe(
    path: Path, overrides: Sequence[str] = (), *, stdin_text: str | None = None
) -> Recipe:
    """Load a recipe; `path` "-" is standard input. Raises Refusal with every error in the recipe.

    Reads only the recipe, its bases and `cluster.measured`, and asks whether a model source or
    tokenizer is a folder. check_files looks for the other files: an estimate needs none of them.
    """
    name = STDIN if str(path) == "-" else str(path)
    directory = os.getcwd() if name == STDIN else os.path.dirname(os.path.abspath(name))
    layers = RecipeComposer(stdin_text)
    root = layers.read_file(name, directory)
    if root is not None:
        root = layers.override(root, overrides)
    if root is None:
        raise Refusal(*layers.errors, source=Source(file=name, texts=layers.texts))
    tree = list(walk_tree(root))
    source = Source(
        file=name,
        locations={path: node.location for path, _, node in tree},
        key_locations={path: key.location for path, key, _ in tree if key is not None},
        texts=layers.texts,
    )
    document = cast(JsonObject, node_value(root))
    return recipe_from_document(document, directory, source, layers.errors)


MISSING_BASE_CODES = ("SW1021", "SW1022")
"""Lists the codes of an `extends` that is a cycle or cannot be read."""


def recipe_from_document(
    given: JsonObject, directory: str, source: Source, errors: Sequence[Diagnostic] = ()
) -> Recipe:
    """Check a document as written, and build its Recipe. errors: found while reading it."""

    def place_order(error: Diagnostic) -> tuple[int, str, int, int]:
        """Order by place: the recipe first, then its bases, then the command line."""
        place, key = error.location, error.key
        while place is None and key is not None:
            place = source.key_locations.get(key) or source.locations.get(key)
            key = key[:-1] if key else None
        place = place or Location(file=source.file, line=0, column=0)
        layer = (place.file != source.file) + place.file.startswith("--")
        return layer, place.file, place.line, place.column

    found = list(errors)
    # Keys whose value or name already has an error.
    spots = {(p.file, p.line, p.column) for error in errors if (p := error.location) is not None}
    reported_keys = {
        path
        for table in (source.locations, source.key_locations)
        for path, p in table.items()
        if path and (p.file, p.line, p.column) in spots
    }
    misfits = schema_errors(given)
    found += [error for error in misfits if error.key not in reported_keys]
    reported_keys |= {error.key for error in found if error.key is not None}
    found += [error for error in optimizer_key_errors(given) if error.key not in reported_keys]
    completed = cast(
        JsonObject,
        fill_in_defaults(recipe_schema(), with_objective_defaults(with_optimizer_defaults(given))),
    )
    reported_keys |= {error.key for error in found if error.key is not None}
    found += [error for error in integer_errors(completed) if error.key not in reported_keys]
    faulty_keys = reported_keys | {error.key for error in found if error.key}
    # What a misspelt key was meant to be is unknown too.
    faulty_keys |= intended_keys(misfits)
    found += cross_key_errors(completed, faulty_keys)
    if any(error.code in MISSING_BASE_CODES for error in errors):  # what is missing may stand there
        found = [error for error in found if error.code != "SW1105"]
    if found:
        raise Refusal(*sorted(found, key=place_order), source=source)
    return build_recipe(resolve_auto(completed), directory, source)

"""A valid, completed document -> Recipe: what depends on another key, on the recipe's folder or on
`auto` is settled here, and the records say the rest."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import replace
from typing import cast

from shardwright.diagnostics import Refusal, Source
from shardwright.recipe.island_keys import single_island_document, with_outer_defaults
from shardwright.recipe.measurements import MeasurementsFile
from shardwright.recipe.measurements_reader import measurements_entry, read_measured
from shardwright.recipe.recipe_paths import absolute_dataset_path, absolute_path, is_folder
from shardwright.recipe.recipe_types import Recipe, with_resolved_kernels
from shardwright.recipe.sbatch_options import sbatch_arguments
from shardwright.utils.json_records import read_record
from shardwright.utils.json_types import JsonObject, JsonValue

# These hold token ids already.
_KINDS_OF_TOKEN_IDS = ("tokens", "megatron", "synthetic")
Section = dict[str, JsonValue]


def recipe_directory(name: str) -> str:
    """The folder that relative paths start from; the working folder for a recipe on standard
    input."""
    return os.path.dirname(os.path.abspath(name))


def resolve_auto(document: JsonObject) -> JsonObject:
    """Settles the `auto` values that depend on another key of the recipe: starting weights and
    tokenizers."""
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
    """As if the recipe gave cluster.checkpoint_gbytes_per_second, in four digits: the compiled
    folder keeps it."""
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
    """Said or left out, it is the same recipe."""
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
    """The recipe, of one of its islands. directory: absolute folder of the recipe file. The schema
    has refused whatever no record would hold. Raises Refusal for `cluster.measured`: its figures
    are a part of the recipe."""
    document, measured = _with_measured(document, directory, source)
    resolved = dict(single_island_document(document))
    for key, resolve in _SECTIONS.items():
        if resolved[key] is not None:
            resolved[key] = resolve(dict(cast(JsonObject, resolved[key])), directory)
    resolved["cluster"] = {
        k: v for k, v in cast(JsonObject, resolved["cluster"]).items() if k != "measured"
    }
    recipe = read_record(Recipe, resolved, directory=directory, document=document, source=source)
    recipe = dataclasses.replace(
        recipe, cluster=dataclasses.replace(recipe.cluster, measured=measured)
    )
    return with_resolved_kernels(recipe, "compile") if recipe.model.kernels == "compile" else recipe


def _with_measured(
    document: JsonObject, directory: str, source: Source
) -> tuple[JsonObject, MeasurementsFile | None]:
    """The document with the file's digest in it, and what the file says."""
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
    """With its paths made absolute, a mixture's parts included, and the keys that its kind does not
    know."""
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

"""`plan MODEL`: the recipe that stands for a model's name and a few flags."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.diagnostics import KeyPath, Location, Refusal, Source
from shardwright.recipe.literal_types import CONTRASTIVE_MODEL_CLASSES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardwright.recipe.recipe_types import Recipe
    from shardwright.utils.json_types import JsonObject

COMMAND_LINE = "the command line"
GPUS_PER_NODE = 8
STEPS = 1000
PRECISION = "bf16"
MAX_ASSUMED_SEQUENCE_LENGTH = 4096
TOKENS_PER_STEP = (
    4 * 2**20
)  # what models of 7 B to 400 B are pre-trained with (Llama 2 and 3: 4 M to 16 M)

# CLIP's batch (arXiv 2103.00020, section 2.5); SigLIP's gains end there (arXiv 2303.15343)
PAIRS_PER_STEP = 32_768

# A configuration's names for its longest sequence.
_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)
_RECIPE_ENDINGS = (".yaml", ".yml", ".json")


def model_source(args: argparse.Namespace) -> str | None:
    """The model.source that the argument names; None where it is a recipe."""
    from shardwright.models.model_catalog import match_catalog_id

    name: str = args.recipe
    if os.path.isdir(name) and os.path.isfile(os.path.join(name, "config.json")):
        return os.path.abspath(name)
    if name == "-" or os.path.exists(name) or name.lower().endswith(_RECIPE_ENDINGS):
        return None
    if shipped := match_catalog_id(name):
        return shipped
    return name if _HUB_ID.fullmatch(name) or args.gpu is not None else None


_MODEL_FLAGS = (
    "gpu",
    "nodes",
    "gpus_per_node",
    "sequence_length",
    "global_batch_size",
    "precision",
)


def model_flags_error(args: argparse.Namespace, model: str | None) -> str:
    """What is wrong with the flags, or ""."""
    given = [
        "--" + flag.replace("_", "-") for flag in _MODEL_FLAGS if getattr(args, flag) is not None
    ]
    if model is None and given:
        return (
            f"{', '.join(given)}: for a model's name only; a recipe has these, change one with "
            "--set KEY=VALUE"
        )
    if model is not None and (args.gpu is None or args.nodes is None):
        where = "" if os.path.exists(args.recipe) else f"there is no file {args.recipe!r}; "
        return f"{where}planning a model without a recipe needs --gpu NAME and --nodes N"
    return ""


def draft_yaml(args: argparse.Namespace, model: str) -> str:
    """The recipe that stands for the command line, as YAML, a section a line."""
    gpus_per_node = args.gpus_per_node or GPUS_PER_NODE
    world = args.nodes * gpus_per_node
    length = args.sequence_length or min(
        MAX_ASSUMED_SEQUENCE_LENGTH, model_max_sequence_length(model)
    )
    config = _config_of(model)
    sequences = (
        PAIRS_PER_STEP
        if config.get("model_type") in CONTRASTIVE_MODEL_CLASSES
        else TOKENS_PER_STEP / length
    )
    batch = args.global_batch_size or max(1, round(sequences / world)) * world
    quote = json.dumps  # of text: JSON's form is YAML's too
    return (
        "version: 1\n"
        "name: plan\n"
        # Weights are not looked at: a plan needs the configuration alone.
        f"model: {{source: {quote(model)}, weights: random}}\n"
        f"cluster: {{nodes: {args.nodes}, gpus_per_node: {gpus_per_node}, gpu: "
        f"{quote(args.gpu)}}}\n"
        f"training: {{sequence_length: {length}, global_batch_size: {batch}, steps: {STEPS}, "
        f"precision: {quote(args.precision or PRECISION)}}}\n"
    )


def model_max_sequence_length(model: str) -> int:
    """The longest sequence that the model's configuration names; where it names none, there is no
    limit."""
    config = _config_of(model)
    text = config.get("text_config")
    if isinstance(text, dict):  # of a model that sees
        config = {**text, **config}
    lengths = [config[key] for key in _LENGTH_KEYS if key in config]
    return next((n for n in lengths if isinstance(n, int) and n > 0), MAX_ASSUMED_SEQUENCE_LENGTH)


def _config_of(model: str) -> JsonObject:
    from shardwright.models.hub_files import hub_config, read_config_file

    try:
        return (
            read_config_file(Path(model) / "config.json")
            if os.path.isabs(model)
            else hub_config(model)
        )
    except Refusal:
        return {}  # stage 2 refuses it again, together with what is wrong elsewhere


def flags_by_recipe_key(args: argparse.Namespace, model: str) -> dict[KeyPath, str]:
    """Recipe key -> the word of the command line that gives it."""
    flags: dict[KeyPath, tuple[str, object]] = {
        ("model", "source"): ("", model),
        ("cluster", "gpu"): ("--gpu ", args.gpu),
        ("cluster", "nodes"): ("--nodes ", args.nodes),
        ("cluster", "gpus_per_node"): ("--gpus-per-node ", args.gpus_per_node),
        **{
            ("training", flag): (f"--{flag.replace('_', '-')} ", getattr(args, flag, None))
            for flag in _MODEL_FLAGS[3:]
        },
    }
    return {key: f"{flag}{value}" for key, (flag, value) in flags.items() if value is not None}


def load_model_recipe(text: str, overrides: Sequence[str], words: Mapping[KeyPath, str]) -> Recipe:
    """The recipe of `text`. There is no file of it, so diagnostics point at the words of the
    command line."""
    from shardwright.recipe.recipe_composition import STDIN
    from shardwright.recipe.recipe_loader import load_recipe

    def word(key: KeyPath) -> Location:
        return Location(file=words.get(key, COMMAND_LINE), line=0, column=0)

    def as_typed(source: Source) -> Source:
        def places(table: Mapping[KeyPath, Location]) -> dict[KeyPath, Location]:
            return {key: word(key) if p.file == STDIN else p for key, p in table.items()}

        texts = {file: body for file, body in source.texts.items() if file != STDIN}
        keys, values = places(source.key_locations), places(source.locations)
        return Source(file=COMMAND_LINE, locations=values, key_locations=keys, texts=texts)

    try:
        recipe = load_recipe(Path("-"), overrides, stdin_text=text)
    except Refusal as refusal:
        source = refusal.source or Source(file=STDIN)
        at = {place: word(key) for key, place in source.locations.items()}
        told = [
            d if d.location not in at else dataclasses.replace(d, location=at[d.location])
            for d in refusal.diagnostics
        ]
        raise Refusal(*told, source=as_typed(source)) from None
    return dataclasses.replace(recipe, source=as_typed(recipe.source))


def assumed_keys(args: argparse.Namespace) -> tuple[str, ...]:
    """The recipe keys that neither the command line's flags nor its --set give."""
    sections = {"gpus_per_node": "cluster"}
    keys = {
        f"{sections.get(flag, 'training')}.{flag}": getattr(args, flag) for flag in _MODEL_FLAGS[2:]
    }
    keys["training.steps"] = None
    overridden = {override.partition("=")[0].strip() for override in args.overrides}
    return tuple(key for key, value in keys.items() if value is None and key not in overridden)


def planned_as(recipe: Recipe) -> JsonObject:
    """The sections that the command line stands for, with --set applied and every default filled
    in."""
    return {key: recipe.document[key] for key in ("model", "cluster", "training", "parallelism")}


def heading(args: argparse.Namespace, text: str) -> list[str]:
    """The recipe in place of which the model was planned, and what of it was assumed; nothing for a
    recipe."""
    if not text:
        return []
    assumed = ", ".join(assumed_keys(args)) or "nothing"
    lines = [
        f"planned as this recipe (assumed: {assumed})",
        *(f"  {line}" for line in text.splitlines()[2:]),
    ]
    return [*lines, *(f"  --set {override}" for override in args.overrides), ""]

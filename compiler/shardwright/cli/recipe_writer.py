"""Writes recipes: for `plan MODEL` and its flags, for `init`, and with the pins of `plan --pin`."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.diagnostics import KeyPath, Location, Refusal, Source
from shardwright.recipe.literal_types import CONTRASTIVE_MODEL_CLASSES
from shardwright.utils.file_io import write_atomically

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardwright.layout.layout import Layout
    from shardwright.recipe.recipe_types import Recipe
    from shardwright.utils.json_values import JsonObject


COMMAND_LINE = "the command line"
NODES, GPUS_PER_NODE = 1, 8
STEPS = 1000
PRECISION = "bf16"
MAX_ASSUMED_SEQUENCE_LENGTH = 4096
# What models of 7 B to 400 B are pre-trained with (Llama 2 and 3: 4 M to 16 M).
TOKENS_PER_STEP = 4 * 2**20
# CLIP's batch (arXiv 2103.00020, section 2.5); SigLIP's gains end there (arXiv 2303.15343)
PAIRS_PER_STEP = 32_768

# A configuration's names for its longest sequence.
_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)
_RECIPE_ENDINGS = (".yaml", ".yml", ".json")


def model_source(args: argparse.Namespace) -> str | None:
    """Return the model.source that the argument names; None where it is a recipe."""
    from shardwright.models.model_sources import match_catalog_id

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
    """Return what is wrong with the flags, or ""."""
    given = [
        "--" + flag.replace("_", "-") for flag in _MODEL_FLAGS if getattr(args, flag) is not None
    ]
    if model is None and given:
        return (
            f"{', '.join(given)}: for a model's name only; a recipe has these, change one with "
            "--set KEY=VALUE"
        )
    if model is not None and args.gpu is None:
        where = "" if os.path.exists(args.recipe) else f"there is no file {args.recipe!r}; "
        return f"{where}planning a model without a recipe needs --gpu NAME, such as --gpu h100"
    return ""


def draft_yaml(args: argparse.Namespace, model: str) -> str:
    """Return the recipe that stands for the command line, as YAML, a section a line."""
    nodes, gpus_per_node = args.nodes or NODES, args.gpus_per_node or GPUS_PER_NODE
    world = nodes * gpus_per_node
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
        f"cluster: {{nodes: {nodes}, gpus_per_node: {gpus_per_node}, gpu: "
        f"{quote(args.gpu)}}}\n"
        f"training: {{sequence_length: {length}, global_batch_size: {batch}, steps: {STEPS}, "
        f"precision: {quote(args.precision or PRECISION)}}}\n"
    )


def model_max_sequence_length(model: str) -> int:
    """Return the longest sequence that the model's configuration names;
    MAX_ASSUMED_SEQUENCE_LENGTH where it names none."""
    config = _config_of(model)
    text = config.get("text_config")
    if isinstance(text, dict):  # of a vision-language model
        config = {**text, **config}
    lengths = [config[key] for key in _LENGTH_KEYS if key in config]
    return next((n for n in lengths if isinstance(n, int) and n > 0), MAX_ASSUMED_SEQUENCE_LENGTH)


def _config_of(model: str) -> JsonObject:
    from shardwright.models.model_sources import hub_config, read_config_file

    try:
        return (
            read_config_file(Path(model) / "config.json")
            if os.path.isabs(model)
            else hub_config(model)
        )
    except Refusal:
        return {}  # stage 2 refuses it again, together with what is wrong elsewhere


def flags_by_recipe_key(args: argparse.Namespace, model: str) -> dict[KeyPath, str]:
    """Map recipe keys to the words of the command line that give them."""
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
    """Load the recipe of `text`. Its diagnostics point at the words of the command line, because
    there is no file."""
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
    """Return the recipe keys that neither the command line's flags nor its --set give."""
    sections = {"nodes": "cluster", "gpus_per_node": "cluster"}
    keys = {
        f"{sections.get(flag, 'training')}.{flag}": getattr(args, flag) for flag in _MODEL_FLAGS[1:]
    }
    keys["training.steps"] = None
    overridden = {override.partition("=")[0].strip() for override in args.overrides}
    return tuple(key for key, value in keys.items() if value is None and key not in overridden)


def planned_as(recipe: Recipe) -> JsonObject:
    """Return the sections that the command line stands for, with --set and the defaults applied."""
    return {key: recipe.document[key] for key in ("model", "cluster", "training", "parallelism")}


def heading(args: argparse.Namespace, text: str) -> list[str]:
    """Return the recipe that stands for the model's name, and what it assumes; [] for a recipe."""
    if not text:
        return []
    assumed = ", ".join(assumed_keys(args)) or "nothing"
    lines = [
        f"planned as this recipe (assumed: {assumed})",
        *(f"  {line}" for line in text.splitlines()[2:]),
    ]
    return [*lines, *(f"  --set {override}" for override in args.overrides), ""]


# The text of a first recipe: what to fill in, with the values that a first run takes.


CPU_SEQUENCE = 128
TOKENS_PER_GPU = 2**16  # of a step, so that each GPU is busy
CPU_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class StarterSettings:
    """Holds what the command line says. model: as the recipe shall name it. has_weights: it is a
    folder that holds weights."""

    model: str
    has_weights: bool
    name: str
    gpu: str
    nodes: int
    gpus_per_node: int


def starter_recipe_yaml(settings: StarterSettings, source: str) -> str:
    """Return YAML with a comment for each decision. source: the model's absolute folder, or its hub
    id. An unknown GPU or model gets a recipe too: the check that follows says what is wrong."""
    from shardwright.layout.formats import FORMATS
    from shardwright.layout.gpu_cluster import catalogue

    entry = catalogue()["gpus"].get(settings.gpu)
    peaks = entry["peak_tflops"] if entry is not None else {"bf16": 1.0}
    is_cpu = settings.gpu == "cpu"
    length = min(
        CPU_SEQUENCE if is_cpu else MAX_ASSUMED_SEQUENCE_LENGTH, model_max_sequence_length(source)
    )
    world = max(1, settings.nodes * settings.gpus_per_node)
    tokens = min(TOKENS_PER_STEP, world * (CPU_TOKENS if is_cpu else TOKENS_PER_GPU))
    batch = max(1, round(tokens / length / world)) * world
    precision = "fp32" if is_cpu else "bf16" if "bf16" in peaks else "fp16"
    quote = json.dumps  # of text: JSON's form is YAML's too
    links = (
        ""
        if entry is None
        else _LINKS.format(
            intra=f"{entry['intra_node_gbytes_per_second']:g}",
            inter=f"{entry['inter_node_gbits_per_second']:g}",
        )
    )
    return _TEXT.format(
        name=settings.name,
        model=quote(settings.model),
        nodes=settings.nodes,
        gpus_per_node=settings.gpus_per_node,
        gpu=quote(settings.gpu),
        links=links,
        islands=_ISLANDS if settings.nodes > 1 else "",
        length=length,
        batch=batch,
        step_tokens=f"{batch * length:,}",
        precision=precision,
        precisions=", ".join(name for name in peaks if name in FORMATS),
        weights=_PRETRAINED if settings.has_weights else _RANDOM,
        lr=_FINE_TUNING if settings.has_weights else _FROM_SCRATCH,
    )


_PRETRAINED = (
    "pretrained # goes on from the folder's weights; `random` trains from scratch (at lr 3e-4, say)"
)
_RANDOM = "random # from scratch; `pretrained` goes on from the published weights (at lr 2e-5, say)"
# Of fine-tuning whole models of 7 B (Alpaca, and Llama 2's section 3.1); of pre-training (Llama 2,
# table 1).
_FINE_TUNING, _FROM_SCRATCH = "2e-5", "3e-4"
_LINKS = """\
  # intra_node_gbytes_per_second: {intra} # per GPU, one direction; this is the catalogue's value
  # inter_node_gbits_per_second: {inter} # per GPU; this is the catalogue's value
"""
_ISLANDS = """\
  # islands: 2 # groups of nodes with a slow link between them (docs/islands.md)
  # inter_island_gbits_per_second: 10 # of that link
"""
_TEXT = """\
# Every key with its default: `shardwright schema`. Next:
#   shardwright check FILE               is it right?
#   shardwright plan FILE                the layouts, best first; --pin ROW writes one here
#   shardwright compile FILE -o DIR      the folder that trains; shardwright run DIR
version: 1
name: {name}

model:
  source: {model}
  weights: {weights}

cluster:
  nodes: {nodes} # or auto, with training.days_at_most: the fewest that meet the deadline
  gpus_per_node: {gpus_per_node}
  gpu: {gpu}
{links}\
{islands}\
  # host_memory_gib: 1800 # of a node; lets `parallelism.offload: auto` move states there
  # price_per_gpu_hour: 2.5 # for the cost, in any currency

training:
  sequence_length: {length}
  global_batch_size: {batch} # sequences a step: {step_tokens} tokens
  steps: 1000 # or tokens: 1e12
  precision: {precision} # this GPU has {precisions}
  optimizer: {{name: adamw, lr: {lr}, betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.1}}
  scheduler: {{name: cosine, warmup_ratio: 0.03, min_lr_ratio: 0.1}}
  gradient_clipping: 1.0
  seed: 1234

data:
  kind: synthetic # made-up tokens, to measure with; your own, for example:
  # kind: text
  # path: corpus/*.txt # relative to this file
  # tokenizer: {model} # or byte, or a folder
  # packing: false

# parallelism: # every key is auto: the compiler chooses. A value pins it.
#   tensor: 2
#   pipeline: 4
#   zero_stage: 1

checkpoint:
  directory: checkpoints # in the compiled folder
  every_steps: 500 # or auto: by how long a save takes and how often the cluster fails
  keep: 3
"""

# `plan --pin ROW`: one row of the table becomes the `parallelism` section of a recipe, comments
# and order kept.


WIDE = 4096  # columns: ruamel.yaml would fold the user's long lines


def write_pinned_recipe(text: str, target: Path, strategy: Layout, recipe: Recipe) -> None:
    """Write `text`, which was read as `recipe`, with the pins in it. A file there is replaced."""
    write_atomically(
        target, recipe_text_with_pins(text, strategy, recipe, as_json=target.suffix == ".json")
    )


def recipe_text_with_pins(
    text: str, strategy: Layout, recipe: Recipe, *, as_json: bool = False
) -> str:
    """Return `text` with the pins, also where `auto` stands in a file that it extends."""
    if as_json:
        document = json.loads(text)
        _pin(document, strategy, recipe)
        return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    from ruamel.yaml import YAML

    yaml = YAML(typ="rt")
    yaml.preserve_quotes = True
    yaml.width = WIDE
    document = yaml.load(text)
    _pin(document, strategy, recipe)
    out = io.StringIO()
    yaml.dump(document, out)
    return out.getvalue()


def _pin(document: dict[str, Any], strategy: Layout, recipe: Recipe) -> None:
    _section(document, "parallelism").update(strategy.pins())
    training: Any = recipe.document["training"]
    if training["days_at_most"] is not None:  # the deadline has chosen the number of nodes
        _section(document, "cluster")["nodes"] = strategy.world_size // recipe.cluster.gpus_per_node
        _section(document, "training")["days_at_most"] = None


def _section(document: dict[str, Any], name: str) -> Any:
    if not isinstance(document.get(name), dict):
        document[name] = {}
    return document[name]

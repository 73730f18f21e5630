"""Recognize files that are given to `lint` and are no ds_config, and read the DeepSpeed settings of
Accelerate's own configuration."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from shardwright.diagnostics import Diagnostic, KeyPath, Location, Refusal, Source, found
from shardwright.engines.deepspeed.ds_config_schema import ds_config_schema, properties
from shardwright.lint.ds_config_document import Document
from shardwright.recipe.recipe_tree import LineOffsets, MapNode, Node, node_value, walk_tree
from shardwright.utils.json_values import JsonValue


class FileKind(NamedTuple):
    """Describe a kind. keys: any one of these sets stands at the top of such a file. help: what to
    do with it instead."""

    name: str
    keys: tuple[frozenset[str], ...]
    help: str


def _any(*texts: str) -> tuple[frozenset[str], ...]:
    return tuple(frozenset(text.split()) for text in texts)


_NAMES_A_DS_CONFIG = "Lint the ds_config that its `{key}` names."
ACCELERATE = FileKind(
    "Accelerate's configuration",
    _any("compute_environment", "distributed_type", "downcast_bf16", "main_training_function")
    + _any("deepspeed_config"),
    "It has no deepspeed_config. `shardwright import FILE` reads it.",
)
KINDS = (
    FileKind(
        "a recipe of Shardwright",
        _any("version cluster", "version training", "extends", "model cluster training"),
        "`shardwright check FILE` reads it; `compile` writes its ds_config.json.",
    ),
    FileKind(
        "the plan of a compiled folder",
        _any("recipe_hash strategy"),
        "Lint the ds_config.json beside it.",
    ),
    ACCELERATE,
    FileKind(
        "a configuration of LLaMA-Factory",
        _any("model_name_or_path stage finetuning_type", "model_name_or_path template cutoff_len"),
        _NAMES_A_DS_CONFIG.format(key="deepspeed"),
    ),
    FileKind(
        "a configuration of Axolotl",
        _any("base_model datasets", "base_model sequence_len"),
        _NAMES_A_DS_CONFIG.format(key="deepspeed"),
    ),
    FileKind(
        "arguments of the Hugging Face Trainer",
        _any("model_name_or_path", "per_device_train_batch_size", "output_dir learning_rate"),
        _NAMES_A_DS_CONFIG.format(key="deepspeed"),
    ),
    FileKind(
        "a model's config.json",
        _any("model_type architectures", "model_type hidden_size", "_name_or_path model_type"),
        "`--model FOLDER` names the model beside a ds_config.",
    ),
    FileKind("a tokenizer's configuration", _any("tokenizer_class", "added_tokens model"), ""),
    FileKind("a model's generation_config.json", _any("transformers_version eos_token_id"), ""),
    FileKind("an index of weight files", _any("weight_map"), ""),
    FileKind("the Trainer's state of a checkpoint", _any("log_history global_step"), ""),
    FileKind("a LoRA adapter's configuration", _any("peft_type"), ""),
)
"""Lists the kinds, special before general: the first match counts."""

_SCRIPT = re.compile(r"#!.*sh\b|\s*(?:torchrun|srun|accelerate|deepspeed|python3?)\s")
_YAML, _SHELL = (".yaml", ".yml"), (".sh", ".bash", ".slurm", ".sbatch")


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherFile:
    """Hold a file that is no ds_config. node: its YAML or JSON, where it has any."""

    kind: FileKind
    node: Node | None = None


def other_file(name: str, text: str) -> OtherFile | None:
    """Return what a file is that no DeepSpeed reads; None for a ds_config, or for what may be
    one."""
    if name.endswith(_SHELL) or (_SCRIPT.match(text) and not name.endswith(".json")):
        return OtherFile(
            kind=FileKind(
                "a shell script",
                (),
                "Lint the ds_config that it names; `--for megatron` lints its options of "
                "pretrain_gpt.py.",
            )
        )
    if name.endswith((".toml", ".py")):
        what = "TOML" if name.endswith(".toml") else "Python"
        return OtherFile(kind=FileKind(f"a file of {what}", (), "Give the ds_config.json."))
    is_json = text.lstrip("\ufeff \t\r\n").startswith(("{", "["))
    node: Node | None = None
    if is_json:
        try:
            tree: JsonValue = json.loads(text)
        except (ValueError, RecursionError):
            return None
    else:
        node, errors = _yaml_tree(name, text)
        tree = None if node is None or errors else node_value(node)
    if not isinstance(tree, Mapping):
        return None
    kind = next((k for k in KINDS if any(keys <= tree.keys() for keys in k.keys)), None)
    known = properties(ds_config_schema().schema).keys()
    if kind is not None and len(tree.keys() & known) * 2 > len(tree.keys()):
        return None  # more of a ds_config than of anything else
    if kind is None and name.endswith(_YAML) and not tree.keys() & known:
        kind = FileKind("a YAML file of no known kind", (), "Give the ds_config.json.")
    return None if kind is None else OtherFile(kind=kind, node=node)


def _yaml_tree(name: str, text: str) -> tuple[Node | None, tuple[Diagnostic, ...]]:
    from shardwright.recipe.recipe_parser import parse_recipe_text  # takes longer than a ds_config

    return parse_recipe_text(text, LineOffsets(name, text))


def refused_file(name: str, text: str, other: OtherFile) -> Refusal:
    """Return SW4011: what the file is, and what to do with it."""
    help = other.kind.help.replace("FILE", name) or "Give the ds_config.json."
    place = Location(file=name, line=1, column=1)
    error = found("SW4011", place, f"{name} is {other.kind.name}, not a ds_config", help)
    return Refusal(error, source=Source(file=name, texts={name: text}))


# Accelerate's deepspeed_config: keys of DeepSpeedPlugin (accelerate/utils/dataclasses.py), which
# become a ds_config, or the path of one.


_PLUGIN_KEYS: dict[str, tuple[str, ...]] = {
    "zero_stage": ("zero_optimization", "stage"),
    "gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "gradient_clipping": ("gradient_clipping",),
    "offload_optimizer_device": ("zero_optimization", "offload_optimizer", "device"),
    "offload_optimizer_nvme_path": ("zero_optimization", "offload_optimizer", "nvme_path"),
    "offload_param_device": ("zero_optimization", "offload_param", "device"),
    "offload_param_nvme_path": ("zero_optimization", "offload_param", "nvme_path"),
    "zero3_save_16bit_model": (
        "zero_optimization",
        "stage3_gather_16bit_weights_on_model_save",
    ),
}
SECTION, FILE_KEY = "deepspeed_config", "deepspeed_config_file"


@dataclass(frozen=True, slots=True, kw_only=True)
class AccelerateSettings:
    """Hold what Accelerate's file says of DeepSpeed.

    document: the ds_config that Accelerate makes of it, with its places in the file; None where it
    names one, `ds_config_path`
    """

    document: Document | None
    ds_config_path: str | None
    diagnostics: tuple[Diagnostic, ...]
    source: Source


def accelerate_settings(name: str, text: str, other: OtherFile) -> AccelerateSettings | None:
    """Return the DeepSpeed settings of Accelerate's file; None where it has none."""
    node = other.node
    if node is None:
        node, _ = _yaml_tree(name, text)
    entry = node.entries.get(SECTION) if isinstance(node, MapNode) else None
    if not isinstance(node, MapNode) or entry is None or not isinstance(entry.node, MapNode):
        return None
    nodes = {path: (key, below) for path, key, below in walk_tree(node)}
    source = Source(
        file=name,
        locations={path: below.location for path, (_, below) in nodes.items()},
        key_locations={path: key.location for path, (key, _) in nodes.items() if key is not None},
        texts={name: text},
    )
    section = entry.node
    told = [
        Diagnostic(
            code="SW4012",
            severity="warning",
            message=f"Accelerate ignores the section `{SECTION}.{key}`",
            help=f"Write a ds_config.json, and name it: `{SECTION}: {{{FILE_KEY}: ...}}`.",
            key=(SECTION, key),
            location=below.key.location,
        )
        for key, below in section.entries.items()
        if isinstance(below.node, MapNode)
    ]
    path = section.entries.get(FILE_KEY)
    if path is not None:
        told += [
            Diagnostic(
                code="SW4013",
                message=f"Accelerate refuses `{SECTION}.{key}` beside {FILE_KEY}",
                help="Write it in that file alone.",
                key=(SECTION, key),
                location=below.key.location,
            )
            for key, below in section.entries.items()
            if key in _PLUGIN_KEYS
        ]
        written = node_value(path.node)
        folder = os.path.dirname(name)
        named = written if isinstance(written, str) else None
        if named and not os.path.exists(named) and os.path.exists(os.path.join(folder, named)):
            named = os.path.join(folder, named)
        return AccelerateSettings(
            document=None, ds_config_path=named, diagnostics=tuple(told), source=source
        )
    config: dict[str, JsonValue] = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
    }
    places: dict[KeyPath, Location] = {}
    for key, target in _PLUGIN_KEYS.items():
        below = section.entries.get(key)
        value = None if below is None else node_value(below.node)
        if below is not None and value is not None and value != "none":
            _put(config, target, value)
            for depth in range(2, len(target) + 1):
                places[target[:depth]] = below.key.location
            places[target] = below.key.location
    mixed = node.entries.get("mixed_precision")
    precision = None if mixed is None else node_value(mixed.node)
    if mixed is not None and precision in ("bf16", "fp16"):
        config[str(precision)] = {"enabled": True}
        places[str(precision),] = mixed.key.location
    places["zero_optimization",] = entry.key.location
    document = Document(
        name=name,
        text=text,
        uncommented=text,
        config=config,
        is_plain_json=True,
        keys={},
        values={},
        source=replace(source, locations=places, key_locations=places),
    )
    return AccelerateSettings(
        document=document, ds_config_path=None, diagnostics=tuple(told), source=source
    )


def _put(config: dict[str, JsonValue], path: tuple[str, ...], value: JsonValue) -> None:
    for part in path[:-1]:
        below = config.get(part)
        config[part] = below = dict(below) if isinstance(below, Mapping) else {}
        config = below
    config[path[-1]] = value

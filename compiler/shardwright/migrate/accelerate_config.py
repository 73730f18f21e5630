"""Read Accelerate's configuration: the file that `accelerate config` writes.

For import, its DeepSpeed, FSDP, MEGATRON_LM and parallelism_config sections become options of the
launcher. For lint, deepspeed_config becomes the ds_config that Accelerate makes of it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from shardwright.diagnostics import Diagnostic, KeyPath, Location, Source
from shardwright.lint.ds_config_document import Document
from shardwright.migrate.recipe_draft import Setting
from shardwright.migrate.run_files import FileContent, RunFiles, text_of
from shardwright.recipe.recipe_tree import LineOffsets, MapNode, node_value, walk_tree
from shardwright.utils.json_values import JsonValue

SECTION, FILE_KEY = "deepspeed_config", "deepspeed_config_file"
ACCELERATE_KEYS = frozenset(
    {"distributed_type", "compute_environment", SECTION, "megatron_lm_config"}
    | {"parallelism_config", "downcast_bf16", "main_training_function"}
)
_SECTIONS = frozenset(
    {SECTION, "fsdp_config", "megatron_lm_config", "parallelism_config"}
    | {"fp8_config", "dynamo_config"}
)
# A key -> the option's name on the command line, where it is another one.
_NAMES = {"deepspeed_hostfile": "hostfile"}
NESTED = "Accelerate reads no section inside deepspeed_config: the run did not have it"


def add_accelerate_config(file: FileContent, run: RunFiles) -> None:
    """Add the file's keys to the options; what the command gives counts more."""
    run.files.append(file.path)
    for key, value in file.tree.items():
        if key in _SECTIONS and isinstance(value, Mapping):
            for name, below in value.items():
                if isinstance(below, Mapping | list):
                    why = NESTED if key == SECTION else "a recipe has no such key"
                    run.left.append(("parallelism", f"{key}.{name}", below, why))
                else:
                    _add(run, name, below)
        elif isinstance(value, Mapping | list):
            if value:
                why = "an option of the launcher that a recipe does not have"
                run.left.append(("launch", key, value, why))
        else:
            _add(run, key, value)


def _add(run: RunFiles, name: str, value: object) -> None:
    text = "" if value is None else text_of(value if isinstance(value, bool) else str(value))
    option = _NAMES.get(name, name)
    if text:
        run.options.setdefault(
            option, Setting(written=name, values=(text,), owner="Accelerate's file")
        )


# Keys of DeepSpeedPlugin (accelerate/utils/dataclasses.py) -> those of the ds_config that it makes.
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


def accelerate_settings(name: str, text: str) -> AccelerateSettings | None:
    """Return the DeepSpeed settings of Accelerate's file for lint; None where it has none."""
    from shardwright.recipe.recipe_parser import parse_recipe_text  # takes longer than a ds_config

    node, _ = parse_recipe_text(text, LineOffsets(name, text))
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

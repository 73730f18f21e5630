"""The kinds of files that are given to `import` and `lint`: how each is recognized, who reads it,
and what to do with one that is not read.

A new kind is a row of KINDS, and a reader.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from shardwright.diagnostics import Location, Refusal, Source, found
from shardwright.engines.deepspeed.ds_config_schema import ds_config_schema, properties
from shardwright.lint.ds_config_document import parse_ds_config, read_ds_config_text
from shardwright.migrate.accelerate_config import (
    ACCELERATE_KEYS,
    AccelerateSettings,
    accelerate_settings,
    add_accelerate_config,
)
from shardwright.migrate.checkpoint_folder import add_checkpoint, is_checkpoint
from shardwright.migrate.launch_command import read_command
from shardwright.migrate.run_files import FileContent, RunFiles
from shardwright.migrate.training_programs import PROGRAMS, TrainingProgram
from shardwright.recipe.recipe_tree import LineOffsets, node_value
from shardwright.utils.json_values import JsonObject

_SCRIPT_ENDINGS = (".sh", ".bash", ".zsh", ".slurm", ".sbatch", ".sub")
_YAML_ENDINGS = (".yaml", ".yml")
_JINJA = re.compile(r"(?m)((?::|-)[ \t]+)(\{\{[^\n#]*[^\n#\s])")
_IMPORT_READS = (
    "Import reads a ds_config.json, a YAML file of Accelerate, LLaMA-Factory, Axolotl, ms-swift, "
    "TRL or the Trainer, a shell script that starts a training, or a checkpoint folder."
)
_SCRIPT = re.compile(r"#!.*sh\b|\s*(?:torchrun|srun|accelerate|deepspeed|python3?)\s")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileKind:
    """Describe a kind.

    name: what import calls it; phrase: what lint calls it, the name where it is empty
    keys: any one of these sets stands at the top of such a file
    matches: looks at the file, where keys do not tell
    read: adds what the file says to the run of import; None where import does not read it
    lint: returns its DeepSpeed settings; None where lint does not read it
    help: what to do with a file that the command does not read; FILE is its name
    """

    name: str
    phrase: str = ""
    keys: tuple[frozenset[str], ...] = ()
    matches: Callable[[FileContent], bool] = lambda file: False
    read: Callable[[FileContent, RunFiles], None] | None = None
    lint: Callable[[str, str], AccelerateSettings | None] | None = None
    help: str = ""

    def is_kind_of(self, file: FileContent) -> bool:
        return any(keys <= file.keys for keys in self.keys) or self.matches(file)


def _any(*sets: str) -> tuple[frozenset[str], ...]:
    return tuple(frozenset(names.split()) for names in sets)


def _is_script(file: FileContent) -> bool:
    is_json = file.path.endswith(".json")
    return file.path.endswith(_SCRIPT_ENDINGS) or (not is_json and bool(_SCRIPT.match(file.text)))


def _add_script(file: FileContent, run: RunFiles) -> None:
    if run.command is not None:
        cause = f"{file.path} is a shell script, and --launch gives a second command"
        raise Refusal(found("SW1451", None, cause, "Give the script, or the command."))
    run.command = read_command(file.text, owner=file.path)
    run.script_folder = os.path.dirname(file.path)


def _ends(ending: str) -> Callable[[FileContent], bool]:
    return lambda file: file.path.endswith(ending)


def _has_below(name: str) -> Callable[[FileContent], bool]:
    return lambda file: any(
        isinstance(value, Mapping) and name in value for value in file.tree.values()
    )


def _add_settings(program: TrainingProgram) -> Callable[[FileContent, RunFiles], None]:
    def add(file: FileContent, run: RunFiles) -> None:
        run.program = program
        run.add_settings(file)

    return add


def _is_ds_config(file: FileContent) -> bool:
    if file.text.lstrip().startswith(("{", "[", "//", "/*")) or not file.keys:
        return not file.path.endswith(_YAML_ENDINGS) or bool(file.keys)
    return _has_mostly_ds_config_keys(file)


def _has_mostly_ds_config_keys(file: FileContent) -> bool:
    return len(file.keys & _ds_config_keys()) * 2 > len(file.keys)


def _ds_config_keys() -> frozenset[str]:
    return frozenset(properties(ds_config_schema().schema))


def _add_ds_config(file: FileContent, run: RunFiles) -> None:
    run.document = parse_ds_config("<stdin>" if file.path == "-" else file.path, file.text)


_NAMES_A_DS_CONFIG = "Lint the ds_config that its `deepspeed` names."
_DEEPSPEED = FileKind(name="DeepSpeed", matches=_is_ds_config, read=_add_ds_config)
KINDS = (
    FileKind(name="a checkpoint folder", matches=is_checkpoint, read=add_checkpoint),
    FileKind(
        name="a shell script",
        matches=_is_script,
        read=_add_script,
        help="Lint the ds_config that it names; `--for megatron` lints its options of "
        "pretrain_gpt.py.",
    ),
    FileKind(
        name="a recipe",
        phrase="a recipe of Shardwright",
        keys=_any("version cluster", "version training", "extends", "model cluster training"),
        help="`shardwright check FILE` reads it; `compile` writes its ds_config.json.",
    ),
    FileKind(
        name="the plan of a compiled folder",
        keys=_any("recipe_hash strategy"),
        help="Give the ds_config.json beside it.",
    ),
    FileKind(name="verl", phrase="a configuration of verl", keys=_any("actor_rollout_ref")),
    FileKind(
        name="torchtune", phrase="a configuration of torchtune", matches=_has_below("_component_")
    ),
    FileKind(name="NeMo", phrase="a configuration of NeMo", keys=_any("trainer exp_manager")),
    FileKind(
        name="nanotron", phrase="a configuration of nanotron", keys=_any("parallelism data_stages")
    ),
    FileKind(name="torchtitan", phrase="a file of TOML", matches=_ends(".toml")),
    FileKind(name="a file of Python", matches=_ends(".py")),
    FileKind(
        name="Accelerate",
        phrase="Accelerate's configuration",
        keys=tuple(frozenset({key}) for key in ACCELERATE_KEYS),
        read=add_accelerate_config,
        lint=accelerate_settings,
        help="It has no deepspeed_config. `shardwright import FILE` reads it.",
    ),
    FileKind(
        name="a model's configuration",
        phrase="a model's config.json",
        keys=_any("model_type architectures", "model_type hidden_size", "_name_or_path model_type"),
        help="`--model FOLDER` names the model, beside a ds_config or a command.",
    ),
    FileKind(
        name="a tokenizer's configuration", keys=_any("tokenizer_class", "added_tokens model")
    ),
    FileKind(
        name="a model's generation_config.json", keys=_any("transformers_version eos_token_id")
    ),
    FileKind(name="an index of weight files", keys=_any("weight_map")),
    FileKind(name="the Trainer's state of a checkpoint", keys=_any("log_history global_step")),
    FileKind(name="a LoRA adapter's configuration", keys=_any("peft_type")),
    *(
        FileKind(
            name=program.name,
            phrase=program.file_phrase or f"a configuration of {program.name}",
            keys=program.keys,
            read=_add_settings(program),
            help=_NAMES_A_DS_CONFIG,
        )
        for program in PROGRAMS
        if program.keys
    ),
    _DEEPSPEED,
)
"""Lists the kinds, special before general: the first match counts."""
_UNKNOWN_YAML = FileKind(name="a YAML file of no known kind")


def _kind_of(file: FileContent) -> FileKind | None:
    return next((kind for kind in KINDS if kind.is_kind_of(file)), None)


def other_file(name: str, text: str) -> FileKind | None:
    """Return the kind of a file that is no ds_config; None for what may be one."""
    try:
        file = FileContent(path=name, text=text, tree=_tree(name, text))
    except Refusal:
        return None
    kind = _kind_of(file)
    if kind is _DEEPSPEED or _has_mostly_ds_config_keys(file):
        return None
    if kind is None and name.endswith(_YAML_ENDINGS) and file.keys:
        return None if file.keys & _ds_config_keys() else _UNKNOWN_YAML
    return kind


def refused_file(name: str, text: str, kind: FileKind) -> Refusal:
    """Return SW4011: what the file is, and what to do with it."""
    help = kind.help.replace("FILE", name) or "Give the ds_config.json."
    place = Location(file=name, line=1, column=1)
    error = found("SW4011", place, f"{name} is {kind.phrase or kind.name}, not a ds_config", help)
    return Refusal(error, source=Source(file=name, texts={name: text}))


def add_file(path: str, run: RunFiles) -> None:
    """Read a file by its kind.

    Raises Refusal with SW1451, SW1452, SW1455 or SW4001 to SW4009.
    """
    if path != "-" and os.path.isdir(path):
        folder = FileContent(path=path, folder=Path(path))
        if not is_checkpoint(folder):
            read_ds_config_text(path)  # says that it is a folder
        add_checkpoint(folder, run)
        return
    text = read_ds_config_text(path)
    file = FileContent(path=path, text=text, tree=_tree(path, text))
    kind = _kind_of(file)
    if kind is None or kind.read is None:
        what = "of no known kind" if kind is None else f"of a kind that is not read: {kind.name}"
        help = kind.help.replace("FILE", path) if kind is not None else ""
        raise Refusal(found("SW1455", None, f"{path} is {what}", help or _IMPORT_READS))
    kind.read(file, run)


def read_settings_file(path: str, owner: str) -> FileContent:
    """Read a YAML or JSON file that a command names. Raises Refusal with SW1452."""
    try:
        text = read_ds_config_text(path)
    except Refusal as refusal:
        cause = refusal.diagnostics[0].message
        help = "Start import in the folder that the command starts in."
        raise Refusal(found("SW1452", None, f"{owner}: {cause}", help)) from None
    tree = _tree(path, text)
    if not tree:
        place = Location(file=path, line=0, column=0)
        cause = f"{owner}: {path} holds no settings"
        help = "Give the file that the program reads."
        raise Refusal(found("SW1452", place, cause, help))
    return FileContent(path=path, text=text, tree=tree)


def _tree(path: str, text: str) -> JsonObject:
    """Return the keys of a YAML or JSON file; none where it holds something else.

    Raises Refusal with SW1452 for a YAML file that cannot be read.
    """
    from shardwright.recipe.recipe_parser import parse_recipe_text  # takes longer than a ds_config

    is_yaml = path.endswith(_YAML_ENDINGS)
    if path.endswith((*_SCRIPT_ENDINGS, ".toml", ".py")) or text.startswith("#!"):
        return {}
    if not is_yaml and text.lstrip("\ufeff \t\r\n").startswith(("{", "[")):
        try:
            document = json.loads(text)
        except (ValueError, RecursionError):
            return {}
        return document if isinstance(document, dict) else {}
    text = _JINJA.sub(lambda found: found[1] + json.dumps(found[2]), text)
    node, errors = parse_recipe_text(text, LineOffsets(path, text))
    if errors:
        if not is_yaml:
            return {}
        source = Source(file=path, texts={path: text})
        raise Refusal(*(replace(error, code="SW1452") for error in errors), source=source)
    document = None if node is None else node_value(node)
    return document if isinstance(document, Mapping) else {}

"""The kinds of files that `import` reads: how each is recognized, and which reader reads it.

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
from shardwright.migrate.accelerate_config import ACCELERATE_KEYS, add_accelerate_config
from shardwright.migrate.checkpoint_folder import add_checkpoint, is_checkpoint
from shardwright.migrate.launch_command import read_command
from shardwright.migrate.run_files import FileContent, RunFiles
from shardwright.migrate.training_programs import PROGRAMS, TrainingProgram
from shardwright.recipe.recipe_parser import parse_recipe_text
from shardwright.recipe.recipe_tree import LineOffsets, node_value
from shardwright.utils.json_values import JsonObject

_SCRIPT_ENDINGS = (".sh", ".bash", ".zsh", ".slurm", ".sbatch", ".sub")
_YAML_ENDINGS = (".yaml", ".yml")
_JINJA = re.compile(r"(?m)((?::|-)[ \t]+)(\{\{)")
_READ_FILES = (
    "a ds_config.json, a YAML file of Accelerate, LLaMA-Factory, Axolotl, ms-swift, TRL or the "
    "Trainer, a shell script that starts a training, or a checkpoint folder"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileKind:
    """Describe a kind. matches: looks at the file. read: adds what the file says to the run; None
    where the kind is known and not read. help: for a kind that is not read."""

    name: str
    matches: Callable[[FileContent], bool]
    read: Callable[[FileContent, RunFiles], None] | None = None
    help: str = f"Import reads {_READ_FILES}."


def _is_script(file: FileContent) -> bool:
    return file.path.endswith(_SCRIPT_ENDINGS) or bool(re.match(r"#!.*sh\b", file.text))


def _add_script(file: FileContent, run: RunFiles) -> None:
    if run.command is not None:
        cause = f"{file.path} is a shell script, and --launch gives a second command"
        raise Refusal(found("SW1451", None, cause, "Give the script, or the command."))
    run.command = read_command(file.text, owner=file.path)
    run.script_folder = os.path.dirname(file.path)


def _has(*names: str) -> Callable[[FileContent], bool]:
    return lambda file: file.keys >= frozenset(names)


def _is_of(program: TrainingProgram) -> Callable[[FileContent], bool]:
    return lambda file: any(keys <= file.keys for keys in program.keys)


def _add_settings(program: TrainingProgram) -> Callable[[FileContent, RunFiles], None]:
    def add(file: FileContent, run: RunFiles) -> None:
        run.program = program
        run.add_settings(file)

    return add


def _is_ds_config(file: FileContent) -> bool:
    if file.text.lstrip().startswith(("{", "[", "//", "/*")) or not file.keys:
        return not file.path.endswith(_YAML_ENDINGS) or bool(file.keys)
    known = properties(ds_config_schema().schema).keys()
    return len(file.keys & known) * 2 > len(file.keys)


def _add_ds_config(file: FileContent, run: RunFiles) -> None:
    run.document = parse_ds_config("<stdin>" if file.path == "-" else file.path, file.text)


def _has_below(name: str) -> Callable[[FileContent], bool]:
    return lambda file: any(
        isinstance(value, Mapping) and name in value for value in file.tree.values()
    )


KINDS = (
    FileKind(name="a checkpoint folder", matches=is_checkpoint, read=add_checkpoint),
    FileKind(name="a shell script", matches=_is_script, read=_add_script),
    FileKind(
        name="a recipe",
        matches=_has("version", "cluster"),
        help="It is a recipe already: `shardwright check` reads it.",
    ),
    FileKind(name="verl", matches=_has("actor_rollout_ref")),
    FileKind(name="torchtune", matches=_has_below("_component_")),
    FileKind(name="NeMo", matches=_has("trainer", "exp_manager")),
    FileKind(name="nanotron", matches=_has("parallelism", "data_stages")),
    FileKind(name="torchtitan", matches=lambda file: file.path.endswith(".toml")),
    FileKind(
        name="Accelerate",
        matches=lambda file: bool(ACCELERATE_KEYS & file.keys),
        read=add_accelerate_config,
    ),
    *(
        FileKind(name=program.name, matches=_is_of(program), read=_add_settings(program))
        for program in PROGRAMS
        if program.keys
    ),
    FileKind(
        name="a model's configuration",
        matches=_has("model_type", "architectures"),
        help="Give --model the folder that holds it, and the command that trains it.",
    ),
    FileKind(name="DeepSpeed", matches=_is_ds_config, read=_add_ds_config),
)
"""Lists the kinds, special before general: the first match counts."""


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
    kind = next((kind for kind in KINDS if kind.matches(file)), None)
    if kind is None or kind.read is None:
        what = "of no known kind" if kind is None else f"of a kind that is not read: {kind.name}"
        help = kind.help if kind is not None else f"Import reads {_READ_FILES}."
        raise Refusal(found("SW1455", None, f"{path} is {what}", help))
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
    is_yaml = path.endswith(_YAML_ENDINGS)
    if path.endswith((*_SCRIPT_ENDINGS, ".toml")) or text.startswith("#!"):
        return {}
    if not is_yaml and text.lstrip().startswith(("{", "[")):
        try:
            document = json.loads(text)
        except (ValueError, RecursionError):
            return {}
        return document if isinstance(document, dict) else {}
    text = _JINJA.sub(r"\1$\2", text)
    node, errors = parse_recipe_text(text, LineOffsets(path, text))
    if errors:
        if not is_yaml:
            return {}
        source = Source(file=path, texts={path: text})
        raise Refusal(*(replace(error, code="SW1452") for error in errors), source=source)
    document = None if node is None else node_value(node)
    return document if isinstance(document, Mapping) else {}

"""Hold what the files and the command of a training say, before it is converted."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shardwright.lint.ds_config_document import Document
from shardwright.migrate.launch_command import LaunchCommand
from shardwright.migrate.recipe_draft import Setting
from shardwright.migrate.training_programs import TrainingProgram
from shardwright.utils.json_values import JsonObject, JsonValue

_JSON_SETTINGS = frozenset({"lr_scheduler_kwargs", "lr_scheduler_args", "deepspeed"})
"""Lists settings whose mapping is one value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileContent:
    """tree: the keys of a YAML or JSON file. folder: of a checkpoint."""

    path: str
    text: str = ""
    tree: JsonObject = field(default_factory=dict)
    folder: Path | None = None

    @property
    def keys(self) -> frozenset[str]:
        return frozenset(self.tree)


@dataclass(slots=True)
class RunFiles:
    """command: of --launch or of a script. settings: of the script or a settings file, as it names
    them. options: of the launcher and of Accelerate's file. left: (recipe section, key, value,
    why) of what is not carried. script_folder: where a shell script lies. checkpoint: what its
    files say, by recipe key. unread: files that a command names and that are
    not here -> why. used: words without a name that were read."""

    command: LaunchCommand | None = None
    document: Document | None = None
    settings: dict[str, Setting] = field(default_factory=dict)
    options: dict[str, Setting] = field(default_factory=dict)
    program: TrainingProgram | None = None
    files: list[str] = field(default_factory=list)
    left: list[tuple[str, str, JsonValue, str]] = field(default_factory=list)
    script_folder: str | None = None
    checkpoint: dict[str, tuple[JsonValue, str]] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    def add_settings(self, file: FileContent) -> None:
        self.files.append(file.path)
        for name, value in settings_of(file.tree, ()):
            self.settings[name] = Setting(written=name, values=value, owner="the file")


def settings_of(
    section: JsonObject, path: tuple[str, ...]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield (dotted name, words) of each setting; null is a setting that is not there."""
    for key, value in section.items():
        name = ".".join((*path, key))
        if isinstance(value, Mapping) and key not in _JSON_SETTINGS:
            yield from settings_of(value, (*path, key))
        elif isinstance(value, list | tuple) and any(isinstance(v, Mapping) for v in value):
            for at, item in enumerate(value):
                if isinstance(item, Mapping):
                    yield from settings_of(item, (*path, key, str(at)))
                else:
                    yield f"{name}.{at}", (text_of(item),)
        elif isinstance(value, list | tuple):
            yield name, tuple(text_of(item) for item in value)
        elif value is not None:
            yield name, (text_of(value),)


def text_of(value: JsonValue) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value)

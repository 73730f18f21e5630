"""The whole conversion: file and command -> Draft."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from shardwright.lint.ds_config_document import Document, read_document, read_file
from shardwright.lint.ds_config_linter import lint, subject_of
from shardwright.lint.lint_rule import dotted
from shardwright.migrate import (
    batch_size_keys,
    deepspeed_engine_keys,
    launcher_keys,
    optimizer_keys,
    trainer_arguments,
)
from shardwright.migrate.accelerate_config import beside, read_accelerate
from shardwright.migrate.import_sources import Sources
from shardwright.migrate.launch_command import LaunchCommand, read_command
from shardwright.migrate.recipe_draft import Draft
from shardwright.utils.json_types import JsonObject, JsonValue

# Words that only the HF Trainer's arguments have.
_TRAINERS = frozenset(
    {"per_device_train_batch_size", "num_train_epochs", "output_dir", "lr_scheduler_type"}
)
# What lint says of a key that stands for nothing here: its value is not taken.
_UNUSABLE = frozenset(
    {"SW4111", "SW4112", "SW4113", "SW4114", "SW4115", "SW4116", "SW4117", "SW4118", "SW4121"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """name: of the recipe. document: None where there is no file of DeepSpeed's."""

    draft: Draft
    name: str
    document: Document | None


def convert(path: str | None, launch: str | None, model: str | None, folder: str) -> Imported:
    """path: ds_config, "-" for standard input, None where the launch names it or there is none.
    folder: absolute, of the recipe. Raises Refusal: SW1451, SW1452, SW4001 to SW4009."""
    command = LaunchCommand() if launch is None else read_command(launch)
    written = command.option("config_file")
    if written is not None:
        command = replace(command, options={**read_accelerate(written[1]), **command.options})
        named = command.options.get("deepspeed_config_file")
        path = path or (beside(written[1], named) if named else None)
    if path is None:
        found = command.words.get("deepspeed") or command.words.get("deepspeed_config")
        path = found[0] if found else None
    document = (
        None if path is None else read_document("<stdin>" if path == "-" else path, read_file(path))
    )
    refused: dict[str, str] = {}
    config: JsonObject = {}
    draft = Draft()
    is_trainer = bool(_TRAINERS & command.words.keys())
    if document is not None:
        subject = subject_of(document)
        is_trainer |= subject.audience == "trainer"
        refused = {dotted(f.key): f.message for f in lint(document, subject) if f.code in _UNUSABLE}
        config = usable(document.config, refused, ())
    sources = Sources(
        draft=draft,
        config=config,
        command=command,
        is_trainer=is_trainer,
        has_command=launch is not None,
    )
    _fill(sources, model, folder)
    if document is not None:
        deepspeed_engine_keys.free_keys(
            replace(sources, config=document.config), refused
        )  # the whole file, for the comments
    trainer_arguments.rest(sources)
    stem = os.path.splitext(os.path.basename(path or "imported"))[0]
    return Imported(draft=draft, name=trainer_arguments.name_of(sources, stem), document=document)


def _fill(s: Sources, model: str | None, folder: str) -> None:
    trainer_arguments.model(s, model)
    launcher_keys.cluster(s, folder)
    batch_size_keys.parallel(s)
    batch_size_keys.length(s)
    batch_size_keys.batch(s)
    batch_size_keys.duration(s)
    deepspeed_engine_keys.precision(s)
    optimizer_keys.optimizer(s)
    trainer_arguments.kwargs(s)
    optimizer_keys.scheduler(s)
    optimizer_keys.clipping(s)
    trainer_arguments.data(s)
    deepspeed_engine_keys.zero(s)
    deepspeed_engine_keys.recomputation(s)
    deepspeed_engine_keys.monitors(s)


def usable(
    section: JsonObject, refused: Mapping[str, str], path: tuple[str, ...]
) -> dict[str, JsonValue]:
    """Without the keys that lint finds wrong."""
    found: dict[str, JsonValue] = {}
    for key, value in section.items():
        if ".".join((*path, key)) not in refused:
            found[key] = (
                usable(value, refused, (*path, key)) if isinstance(value, Mapping) else value
            )
    return found

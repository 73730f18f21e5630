"""Convert a DeepSpeed file and its launch command into a recipe draft."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from shardwright.lint.ds_config_document import Document, parse_ds_config, read_ds_config_text
from shardwright.lint.ds_config_linter import lint, linted_ds_config
from shardwright.lint.lint_rule import dotted
from shardwright.migrate import (
    deepspeed_engine_keys,
    launcher_keys,
    trainer_arguments,
    training_keys,
)
from shardwright.migrate.launch_command import (
    LaunchCommand,
    read_accelerate_config,
    read_command,
    resolve_config_path,
)
from shardwright.migrate.recipe_draft import ImportSources, RecipeDraft
from shardwright.utils.json_values import JsonObject, JsonValue

# Words that only the HF Trainer's arguments have.
_TRAINER_ARGUMENTS = frozenset(
    {"per_device_train_batch_size", "num_train_epochs", "output_dir", "lr_scheduler_type"}
)
# What lint says of a key that stands for nothing here: its value is not taken.
_UNUSABLE_KEY_CODES = frozenset(
    {"SW4111", "SW4112", "SW4113", "SW4114", "SW4115", "SW4116", "SW4117", "SW4118", "SW4121"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedRecipe:
    """Hold an imported recipe; document: None without a ds_config file."""

    draft: RecipeDraft
    name: str
    document: Document | None


def convert_config(
    path: str | None, launch: str | None, model: str | None, folder: str
) -> ImportedRecipe:
    """Convert a configuration.

    path: ds_config, "-" for standard input; None where the launch command names it, or there is
        none
    folder: absolute, of the recipe

    Raises Refusal with SW1451, SW1452, or SW4001 to SW4009.
    """
    command = LaunchCommand() if launch is None else read_command(launch)
    written = command.option("config_file")
    if written is not None:
        command = replace(
            command, options={**read_accelerate_config(written[1]), **command.options}
        )
        named = command.options.get("deepspeed_config_file")
        path = path or (resolve_config_path(written[1], named) if named else None)
    if path is None:
        found = command.words.get("deepspeed") or command.words.get("deepspeed_config")
        path = found[0] if found else None
    document = (
        None
        if path is None
        else parse_ds_config("<stdin>" if path == "-" else path, read_ds_config_text(path))
    )
    lint_messages: dict[str, str] = {}
    config: JsonObject = {}
    draft = RecipeDraft()
    is_trainer = bool(_TRAINER_ARGUMENTS & command.words.keys())
    if document is not None:
        subject = linted_ds_config(document)
        is_trainer |= subject.audience == "trainer"
        lint_messages = {
            dotted(f.key): f.message
            for f in lint(document, subject)
            if f.code in _UNUSABLE_KEY_CODES
        }
        config = without_faulty_keys(document.config, lint_messages, ())
    sources = ImportSources(
        draft=draft,
        config=config,
        command=command,
        is_trainer=is_trainer,
        has_command=launch is not None,
    )
    trainer_arguments.model(sources, model)
    launcher_keys.cluster(sources, folder)
    training_keys.parallel(sources)
    training_keys.length(sources)
    training_keys.batch(sources)
    training_keys.duration(sources)
    deepspeed_engine_keys.precision(sources)
    training_keys.optimizer(sources)
    trainer_arguments.kwargs(sources)
    training_keys.scheduler(sources)
    training_keys.clipping(sources)
    trainer_arguments.data(sources)
    deepspeed_engine_keys.zero(sources)
    deepspeed_engine_keys.recomputation(sources)
    deepspeed_engine_keys.monitors(sources)
    if document is not None:
        deepspeed_engine_keys.convert_extra_keys(
            replace(sources, config=document.config), lint_messages
        )  # the whole file, for the comments
    trainer_arguments.rest(sources)
    stem = os.path.splitext(os.path.basename(path or "imported"))[0]
    return ImportedRecipe(
        draft=draft, name=trainer_arguments.name_of(sources, stem), document=document
    )


def without_faulty_keys(
    section: JsonObject, lint_messages: Mapping[str, str], path: tuple[str, ...]
) -> dict[str, JsonValue]:
    """Return the configuration without the keys that lint finds wrong."""
    found: dict[str, JsonValue] = {}
    for key, value in section.items():
        if ".".join((*path, key)) not in lint_messages:
            found[key] = (
                without_faulty_keys(value, lint_messages, (*path, key))
                if isinstance(value, Mapping)
                else value
            )
    return found

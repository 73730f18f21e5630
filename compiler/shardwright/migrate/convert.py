"""The whole conversion: file and command -> Draft."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from shardwright.ir.json_value import JsonObject, JsonValue
from shardwright.lint.document import Document, read_document, read_file
from shardwright.lint.lint import lint, subject_of
from shardwright.lint.subject import dotted
from shardwright.migrate import batch, cluster, engine, optimizer, trainer
from shardwright.migrate.accelerate import beside, read_accelerate
from shardwright.migrate.command import LaunchCommand, read_command
from shardwright.migrate.draft import Draft
from shardwright.migrate.sources import Sources

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
        engine.free_keys(
            replace(sources, config=document.config), refused
        )  # the whole file, for the comments
    trainer.rest(sources)
    stem = os.path.splitext(os.path.basename(path or "imported"))[0]
    return Imported(draft=draft, name=trainer.name_of(sources, stem), document=document)


def _fill(s: Sources, model: str | None, folder: str) -> None:
    trainer.model(s, model)
    cluster.cluster(s, folder)
    batch.parallel(s)
    batch.length(s)
    batch.batch(s)
    batch.duration(s)
    engine.precision(s)
    optimizer.optimizer(s)
    trainer.kwargs(s)
    optimizer.scheduler(s)
    optimizer.clipping(s)
    trainer.data(s)
    engine.zero(s)
    engine.recomputation(s)
    engine.monitors(s)


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

"""Check a recipe's model and tokenizers without torch, transformers or the network."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardwright.diagnostics import Diagnostic, KeyPath, Refusal, found
from shardwright.models.config_schema import (
    config_errors,
    has_remote_code,
    is_tied,
    processor_packages,
    vocabulary_size,
)
from shardwright.models.model_files import TOKENIZER_PATTERNS
from shardwright.models.model_sources import (
    CONFIG_NAME,
    PROCESSOR_FILES,
    cached_config,
    catalog_config,
    invalid_model_id,
    local_config,
    local_processor,
    locate_weights,
    nearest_ids,
    read_config_file,
)
from shardwright.models.model_support import (
    missing_processor_package,
    support,
    vision_language_types,
)
from shardwright.models.remote_code import untrusted_code_error
from shardwright.models.tokenizer_packages import missing_packages_warning
from shardwright.models.weights_check import check_headers
from shardwright.recipe.recipe_types import ModelSection, Recipe
from shardwright.utils.file_io import parse_json, read_regular_file
from shardwright.utils.json_values import JsonObject

MOST_TOKENIZER_BYTES = 128 * 2**20
BYTE_SYMBOLS = 256


def check_model(recipe: Recipe) -> tuple[Diagnostic, ...]:
    """Return the errors that `compile` would raise; a note marks what only the hub can tell."""
    section, source = recipe.model, recipe.model.source or ""
    config, wrong = section.config, list[Diagnostic]()
    try:
        if config is None and os.path.isabs(source):
            path = Path(source, CONFIG_NAME)
            # check_files reports a missing file.
            config = read_config_file(path) if path.is_file() else None
        elif config is None:
            config = local_config(source, section.revision)
            wrong += [] if config is not None else [_unknown(source, ("model", "source"))]
    except Refusal as refusal:
        return refusal.diagnostics
    if config is not None:
        inline = section.config is not None
        if not inline and section.trust_remote_code is None and has_remote_code(config):
            wrong.append(untrusted_code_error(source, config.get("model_type")))
        wrong += config_errors(
            config, ("model", "config") if inline else ("model", "source"), inline
        )
        wrong += _processor(section, config)
    wrong += _weights(section, config)
    is_wrong = any(diagnostic.severity == "error" for diagnostic in wrong)
    vocabulary = None if config is None or is_wrong else vocabulary_size(config)
    for key, part in recipe.tokenized():
        if part.tokenizer is not None:
            own = part.tokenizer == section.source
            wrong += _tokenizer(part.tokenizer, (*key, "tokenizer"), vocabulary, own)
    return tuple(wrong)


def _processor(section: ModelSection, config: JsonObject) -> Iterator[Diagnostic]:
    """Yield SW2080 for a model that trains on images: a warning where its processor is not on this
    machine."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in vision_language_types():
        return
    if section.task != "image-text-to-text" and (
        section.task != "auto" or model_type in support().types
    ):
        return
    here = None if section.config is not None else local_processor(section)
    own: object = None  # the class that the files beside the weights name
    for file in PROCESSOR_FILES:
        if here is None or isinstance(own, str):
            break
        with suppress(OSError, ValueError):
            document = parse_json(read_regular_file(here[0] / file))
            own = document.get("processor_class") if isinstance(document, dict) else None
    name, packages = processor_packages(model_type, own if isinstance(own, str) else None)
    for package in packages:
        if importlib.util.find_spec(package.replace("-", "_")) is None:
            why = f"its {name} needs {package}, which is not installed here"
            error = missing_processor_package(model_type, why, package)
            is_certain = section.config is not None or here is not None
            yield error if is_certain else dataclasses.replace(error, severity="warning")


def _unknown(name: str, key: KeyPath) -> Diagnostic:
    """Report a hub id that is not on this machine."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return invalid_model_id(name)
    code, near = ("SW2001", nearest_ids(name)) if key == ("model", "source") else ("SW1911", ())
    where = ".".join(map(str, key))
    message = f"{where}: {name!r} is not on this machine; compile will download it from the hub"
    help = f"Did you mean {near[0]}?" if near else "Write a local folder as ./folder."
    return found(code, key, message, help, near, "note")


def _weights(section: ModelSection, config: JsonObject | None) -> tuple[Diagnostic, ...]:
    """Check the headers of the weight files; those of a hub id only where they are in the cache."""
    if section.source is None or section.weights != "pretrained":
        return ()
    if not os.path.isabs(section.source):
        cached = cached_config(section.source, section.revision)
        return (
            ()
            if cached is None or config is None
            else check_headers(cached.parent, config, tied=is_tied(config))
        )
    try:
        locate_weights(section)
    except Refusal as refusal:
        return refusal.diagnostics
    return (
        () if config is None else check_headers(Path(section.source), config, tied=is_tied(config))
    )


def _tokenizer(name: str, key: KeyPath, vocabulary: int | None, own: bool) -> Iterator[Diagnostic]:
    """Check a tokenizer against the vocabulary.

    own: whether it is the model's own, whose absence is reported there.
    """
    if name == "byte":
        if vocabulary is not None and vocabulary < BYTE_SYMBOLS:
            message = (
                f"the byte tokenizer has {BYTE_SYMBOLS} symbols, the model's vocabulary "
                f"{vocabulary}"
            )
            yield found(
                "SW1912", key, message, f"Give the model a vocab_size of at least {BYTE_SYMBOLS}."
            )
        return
    folder = Path(name)
    if not folder.is_absolute():
        from huggingface_hub import constants

        cached = Path(constants.HF_HUB_CACHE, "--".join(("models", *name.split("/"))))
        if not own and not cached.is_dir() and catalog_config(name) is None:
            yield _unknown(name, key)
        return
    if not folder.is_dir():
        return  # check_files reports it
    if not any(path.is_file() for pattern in TOKENIZER_PATTERNS for path in folder.glob(pattern)):
        help = (
            "Save it with `save_pretrained` and give that folder (as ./path), or write "
            "`tokenizer: byte`."
        )
        yield found(
            "SW1911", key, f"data.tokenizer: {name!r} holds no tokenizer files", help, ("byte",)
        )
    yield from missing_packages_warning(folder, key)
    largest: int | None = None
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        document: Any = parse_json(
            read_regular_file(folder / "tokenizer.json", MOST_TOKENIZER_BYTES)
        )
        table = document["model"]["vocab"]
        ids = table.values() if isinstance(table, dict) else [len(table) - 1]
        added = [token["id"] for token in document.get("added_tokens") or ()]
        largest = max((*ids, *added), default=None)
    if vocabulary is not None and largest is not None and largest >= vocabulary:
        message = (
            f"the tokenizer {name!r} has ids up to {largest}, the model's vocabulary ends at "
            f"{vocabulary - 1}"
        )
        help = (
            "Text with a larger id is refused: use the model's own tokenizer, or raise vocab_size."
        )
        yield found("SW1912", key, message, help, severity="warning")

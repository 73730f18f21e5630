"""Describe a model's files: starting weights, tokenizer files, remote code."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from shardwright.utils.file_io import parse_json, read_regular_file
from shardwright.utils.json_values import JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsLocation:
    """Locate the starting weights.

    path: absolute folder of config.json and safetensors files.
    revision: commit of a hub model, None for a local folder.
    """

    path: str
    revision: str | None


SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MOST_HEADER_BYTES = 100 * 2**20
"""safetensors' own limit."""


def weight_file_names(folder: Path) -> tuple[str, ...]:
    """Return the files that from_pretrained reads: the single file, else those of the index.

    Raises OSError and ValueError for an index that cannot be read.
    """
    if (folder / SINGLE).exists() or not (folder / INDEX).exists():
        return (SINGLE,)
    return tuple(sorted(set(weight_map(folder).values())))


def weight_map(folder: Path) -> dict[str, str]:
    """Return tensor -> file of the index. Raises OSError and ValueError."""
    files = cast("dict[str, object]", read_weight_index(folder)["weight_map"])
    if any(not isinstance(f, str) or "/" in f or f.startswith(".") for f in files.values()):
        raise ValueError(f"{INDEX} names files outside its folder")
    return {name: str(file) for name, file in files.items()}


def read_weight_index(folder: Path) -> JsonObject:
    """Read the index. Raises OSError and ValueError."""
    index = parse_json(read_regular_file(folder / INDEX, MOST_HEADER_BYTES))
    if not isinstance(index, dict) or not isinstance(index.get("weight_map"), dict):
        raise ValueError(f"{INDEX} has no weight_map")
    return index


DEQUANTIZED_METHODS: tuple[str, ...] = ("fp8", "mxfp4")
"""`quant_method` values whose weights are dequantized on loading (transformers'
`dequantize=True`)."""

TOKENIZER_PATTERNS: tuple[str, ...] = (
    "tokenizer*.json",
    "vocab*",
    "merges*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*.model",
    "preprocessor_config.json",
    "processor_config.json",
)


# Python files of a model whose type transformers does not have.


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteCode:
    """Identify the Python files that a model brings.

    config_class, model_class: "module.Class", as config.json's auto_map names them
        ("modeling_x.XForCausalLM").
    files: (path relative to the model's folder, sha256 hex) of the two modules and their local
        imports.
    """

    config_class: str
    model_class: str
    files: tuple[tuple[str, str], ...]

    @property
    def fingerprint(self) -> str:
        """Return the sha256 (hex) of all files' names and contents."""
        return hashlib.sha256(repr(self.files).encode()).hexdigest()


def exception_summary(error: Exception, most: int) -> str:
    """Return the error's type and at most `most` characters of its first line."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:most]}"

"""Describe a model's files: starting weights, tokenizer files, remote code."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsLocation:
    """Locate the starting weights.

    path: absolute folder of config.json and safetensors files.
    revision: commit of a hub model, None for a local folder.
    """

    path: str
    revision: str | None


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

"""Where the starting weights are, and which files are a tokenizer's."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsLocation:
    """path: absolute folder of config.json and safetensors files. revision: its commit, None for a
    local folder."""

    path: str
    revision: str | None


DEQUANTIZED_METHODS: tuple[str, ...] = ("fp8", "mxfp4")
"""`quant_method` of config.json whose weights are read as numbers, as transformers'
`dequantize=True` does."""

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


def weights_summary(weights: str) -> str:
    """`model.weights` as every summary says it: who brings data of his own shall see what is
    trained on it."""
    return "weights pretrained" if weights == "pretrained" else "weights random (from scratch)"


# Python files that come with a model, for types that transformers does not have itself.


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteCode:
    """config_class, model_class: "module.Class", as config.json's auto_map names them
    ("modeling_x.XForCausalLM").

    files: (path relative to the model's folder, sha256 hex), the two modules and what they import
    from beside them.
    """

    config_class: str
    model_class: str
    files: tuple[tuple[str, str], ...]

    @property
    def fingerprint(self) -> str:
        """sha256 (hex) over all the files' names and contents."""
        return hashlib.sha256(repr(self.files).encode()).hexdigest()

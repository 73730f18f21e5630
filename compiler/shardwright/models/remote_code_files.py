"""Python files that come with a model, for types that transformers does not have itself."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


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

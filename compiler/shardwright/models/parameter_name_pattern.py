"""Dotted names of modules and parameters."""

from __future__ import annotations


def name_pattern(path: str) -> str:
    """ "model.layers.3.mlp.up_proj" -> "model.layers.*.mlp.up_proj": the same for all layers of a
    kind."""
    return ".".join("*" if part.isdecimal() else part for part in path.split("."))

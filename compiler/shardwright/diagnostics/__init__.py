"""Diagnostics: the codes, the type, the renderer (diagnostic_rendering.py, imported only where text
is printed)."""

from shardwright.diagnostics.diagnostic import (
    Diagnostic,
    KeyPath,
    Location,
    Refusal,
    Severity,
    Source,
    found,
    refusal,
)

__all__ = ["Diagnostic", "KeyPath", "Location", "Refusal", "Severity", "Source", "found", "refusal"]

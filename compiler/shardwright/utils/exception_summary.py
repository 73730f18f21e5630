"""Summarize in one line what transformers, or a type's own code, raised."""

from __future__ import annotations


def exception_summary(error: Exception, most: int) -> str:
    """Return the error's type and at most `most` characters of its first line."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:most]}"

"""What transformers, or a type's own code, raised, in one line."""

from __future__ import annotations


def exception_summary(error: Exception, most: int) -> str:
    """Its type, and of its first line so many characters."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:most]}"

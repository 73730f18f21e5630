"""Plain scalars by the core schema of YAML 1.2 (section 10.3.2), and what they must not be."""

from __future__ import annotations

import math
import re

from shardwright.diagnostics import Diagnostic, Location
from shardwright.ir.json_value import JsonScalar

LARGEST_INTEGER = 2**53

_NULL = re.compile(r"null|Null|NULL|~|")
_TRUE = re.compile(r"true|True|TRUE")
_FALSE = re.compile(r"false|False|FALSE")
_DECIMAL = re.compile(r"[-+]?[0-9]+")
_OCTAL = re.compile(r"0o[0-7]+")
_HEXADECIMAL = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")


def resolve(text: str) -> JsonScalar:
    """The value of an unquoted scalar; infinity and NaN come back as such, and integers of any size."""
    if _NULL.fullmatch(text):
        return None
    if _TRUE.fullmatch(text):
        return True
    if _FALSE.fullmatch(text):
        return False
    if _OCTAL.fullmatch(text) or _HEXADECIMAL.fullmatch(text):
        return _integer(text[2:], 8 if text[1] == "o" else 16)
    if _DECIMAL.fullmatch(text):
        return _integer(text, 10)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _NOT_FINITE.fullmatch(text):
        return float(text.replace(".", ""))
    return text


def _integer(digits: str, base: int) -> int:
    # int() refuses thousands of digits; anything this long is beyond 2^53 however it ends.
    significant = digits.lstrip("+-").lstrip("0")
    value = int(significant[:40] or "0", base)
    return -value if digits.startswith("-") else value


def scalar_errors(value: JsonScalar, text: str, location: Location) -> tuple[Diagnostic, ...]:
    """Numbers that JSON cannot hold, and halves of a surrogate pair."""
    shown = text if len(text) <= 40 else f"{text[:37]}..."
    if isinstance(value, float) and not math.isfinite(value):
        return (not_finite(shown, location),)
    if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
        return (too_large_integer(shown, location),)
    if isinstance(value, str) and any("\ud800" <= c <= "\udfff" for c in value):
        return (
            Diagnostic(
                code="SW1016",
                message="this text holds half of a surrogate pair, which is no character",
                help="Write the character itself, or both halves of its pair.",
                location=location,
            ),
        )
    return ()


def not_finite(shown: str, location: Location) -> Diagnostic:
    return Diagnostic(
        code="SW1013",
        message=f"{shown} is not a finite number",
        help="Write a finite number; a key that should have its default is left out.",
        location=location,
    )


def too_large_integer(shown: str, location: Location) -> Diagnostic:
    return Diagnostic(
        code="SW1014",
        message=f"the integer {shown} is beyond 2^53, where JSON readers no longer agree",
        help="Write an integer of at most 9007199254740992, such as 1e12.",
        location=location,
    )

"""Plain scalars by the core schema of YAML 1.2 (section 10.3.2), and what they must not be."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from shardwright.diagnostics import Diagnostic, Location, found
from shardwright.utils.json_types import JsonScalar

LARGEST_INTEGER = 2**53
INTEGER_HELP = "Write an integer of at most 9007199254740992, such as 1e12."

_NULL = re.compile(r"null|Null|NULL|~|")
_TRUE = re.compile(r"true|True|TRUE")
_FALSE = re.compile(r"false|False|FALSE")
_DECIMAL = re.compile(r"[-+]?[0-9]+")
_OCTAL = re.compile(r"0o[0-7]+")
_HEXADECIMAL = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")


def yaml_scalar_value(text: str) -> JsonScalar:
    """The value of an unquoted scalar; infinity and NaN come back as such, and integers of any
    size."""
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


def scalar_errors(value: JsonScalar, text: str, location: Location) -> Iterator[Diagnostic]:
    """Numbers that JSON cannot hold, and halves of a surrogate pair."""
    shown = text if len(text) <= 40 else f"{text[:37]}..."
    if isinstance(value, float) and not math.isfinite(value):
        help = "Write a finite number; a key that should have its default is left out."
        yield found("SW1013", location, f"{shown} is not a finite number", help)
    elif isinstance(value, int) and abs(value) > LARGEST_INTEGER:
        message = f"the integer {shown} is beyond 2^53, where JSON readers no longer agree"
        yield found("SW1014", location, message, INTEGER_HELP)
    elif isinstance(value, str) and any("\ud800" <= c <= "\udfff" for c in value):
        message = "this text holds half of a surrogate pair, which is no character"
        yield found(
            "SW1016", location, message, "Write the character itself, or both halves of its pair."
        )

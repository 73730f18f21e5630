"""Infinity and NaN in a config.json: JSON has none, and transformers writes {"__float__":
"Infinity"}."""

from __future__ import annotations

import math
from typing import Any

_TAG = "__float__"
_NAMES = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def decode_special_floats(value: Any) -> Any:
    """Every tagged float of a JSON document as the number."""
    if isinstance(value, dict):
        if value.keys() == {_TAG} and value[_TAG] in _NAMES:
            return _NAMES[value[_TAG]]
        return {name: decode_special_floats(inner) for name, inner in value.items()}
    return (
        [decode_special_floats(inner) for inner in value]
        if isinstance(value, list | tuple)
        else value
    )


def encode_special_floats(value: Any) -> Any:
    """The inverse: a document that every JSON reader takes."""
    if isinstance(value, dict):
        return {name: encode_special_floats(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [encode_special_floats(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {_TAG: next(name for name, number in _NAMES.items() if str(number) == str(value))}
    return value

"""A JSON document -> events. The standard library judges the text; this only finds where things
stand in it.

YAML readers stumble over some JSON (tabs, \\u pairs, keys of more than 1,024 characters), hence a
reader of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from shardwright.recipe.parse_events import ParseError, ParseEvent

_TOKEN = re.compile(r'[ \t\r\n,:]*(?:([{\[])|([}\]])|("(?:[^"\\]|\\.)*")|([^\s{}\[\],:"]+))')


def _no_constant(name: str) -> None:
    raise ValueError(name)


def is_json(text: str) -> bool:
    """NaN and Infinity are not JSON. Raises ParseError where the nesting is too deep to tell."""
    if not text.lstrip(" \t\r\n").startswith(("{", "[", '"')):
        return False
    try:
        # Numbers stay text: Python's int() refuses thousands of digits.
        json.loads(text, parse_constant=_no_constant, parse_int=str, parse_float=str)
    except RecursionError:
        raise ParseError(
            "the recipe is nested too deeply", 0, "Make it smaller.", "SW1011"
        ) from None
    except ValueError:
        return False
    return True


def json_events(text: str) -> Iterator[ParseEvent]:
    """`text` is valid JSON."""
    for match in _TOKEN.finditer(text):
        opening, closing, string, word = match.groups()
        start, end = match.start(match.lastindex or 0), match.end()
        if opening:
            yield ParseEvent(
                kind="map" if opening == "{" else "list", start=start, end=end, flow=True
            )
        elif closing:
            yield ParseEvent(kind="end", start=start, end=end)
        elif string:
            yield ParseEvent(kind="scalar", start=start, end=end, text=json.loads(string))
        else:
            yield ParseEvent(kind="scalar", start=start, end=end, text=word, plain=True)

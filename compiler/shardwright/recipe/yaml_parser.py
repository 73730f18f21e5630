"""YAML 1.2 -> events, by ruamel.yaml's parser; nothing of its object construction is used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)
from ruamel.yaml.reader import ReaderError

from shardwright.recipe.parse_events import ParseError, ParseEvent

_HINTS: dict[str, str] = {
    "found character '\\t' that cannot start any token": (
        "Indent with spaces; YAML does not allow tabs there."
    ),
    "mapping values are not allowed here": (
        "A value that holds `: ` needs quotes; check the indentation of this line."
    ),
    "could not find expected ':'": "Every key needs a colon and a space after it.",
    "found unexpected end of stream": "A quote or bracket is opened and never closed.",
}
_DEFAULT_HINT = "Check quotes, brackets and indentation at this place and just before it."


def yaml_events(text: str) -> Iterator[ParseEvent]:
    """Raises ParseError."""
    try:
        for event in YAML(typ="safe", pure=True).parse(text):
            start, end = event.start_mark.index, event.end_mark.index
            anchor, tag = getattr(event, "anchor", None), getattr(event, "tag", None)
            if isinstance(event, ScalarEvent):
                plain = not event.style
                yield ParseEvent(
                    kind="scalar",
                    start=start,
                    end=end,
                    text=event.value,
                    plain=plain,
                    anchor=anchor,
                    tag=tag,
                )
            elif isinstance(event, MappingStartEvent | SequenceStartEvent):
                kind: Literal["map", "list"] = (
                    "map" if isinstance(event, MappingStartEvent) else "list"
                )
                yield ParseEvent(
                    kind=kind,
                    start=start,
                    end=end,
                    flow=bool(event.flow_style),
                    anchor=anchor,
                    tag=tag,
                )
            elif isinstance(event, MappingEndEvent | SequenceEndEvent):
                yield ParseEvent(kind="end", start=start, end=end)
            elif isinstance(event, AliasEvent):
                yield ParseEvent(kind="alias", start=start, end=end, text=str(event.anchor))
            elif isinstance(event, DocumentStartEvent):
                if event.version not in (None, (1, 2)):
                    raise ParseError(
                        (
                            f"the file asks for YAML {'.'.join(map(str, event.version))}; recipes "
                            "are YAML 1.2"
                        ),
                        start,
                        "Remove the %YAML line.",
                    )
                yield ParseEvent(kind="document", start=start, end=end)
    except ReaderError as error:
        raise ParseError(
            f"character U+{_code_point(error.character):04X} is not allowed in YAML",
            int(error.position or 0),
            "Remove it, or write it as an escape inside double quotes.",
        ) from None
    except MarkedYAMLError as error:
        problem = " ".join(str(error.problem or error.context or "it cannot be read").split())
        # An unclosed quote is found at the end of the text, and is to be mended where it was
        # opened.
        unclosed = (
            problem.startswith("found unexpected end of stream") and error.context_mark is not None
        )
        mark = error.context_mark if unclosed else error.problem_mark or error.context_mark
        hint = next(
            (hint for start, hint in _HINTS.items() if problem.startswith(start)), _DEFAULT_HINT
        )
        raise ParseError(f"not valid YAML: {problem}", mark.index if mark else 0, hint) from None
    except (YAMLError, ValueError, IndexError, OverflowError, AssertionError) as error:
        # ruamel.yaml raises these, without a place, for some escapes and directives.
        raise ParseError(
            f"not valid YAML: {' '.join(str(error).split()) or type(error).__name__}",
            0,
            _DEFAULT_HINT,
        ) from None


def _code_point(character: object) -> int:
    return character if isinstance(character, int) else ord(str(character)[:1] or "\0")

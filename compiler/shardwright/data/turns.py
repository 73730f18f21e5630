"""What a chat template makes of a conversation, and the characters of it that the model has to learn to write.

A template with {% generation %} marks says so itself. Without them an assistant's turn is what appears when it is added
to the conversation before it. Templates that render an earlier turn in another way than the last one (reasoning that is
dropped) do not extend their own prefixes: there the turn's text is found by replacing it.
"""

from __future__ import annotations

import re
from typing import Protocol

from shardwright.ir.json_value import JsonValue

Message = dict[str, JsonValue]
Span = tuple[int, int]
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_STAND_IN = "\u2022stand-in\u2022"
"""Takes the place of an answer; no template looks for it."""


class TemplateError(Exception):
    """The template's own words, or what its code raises."""


class HiddenTurn(Exception):
    """An answer that cannot be found in the text. args: its number among the messages, from 0."""


class Renders(Protocol):
    """Raises TemplateError."""

    def __call__(self, messages: list[Message], *, prompt: bool) -> str: ...


def find_turns(render: Renders, messages: list[Message]) -> tuple[str, list[Span]]:
    """The text, and where in it the assistant speaks: its turn's end belongs to it, white space behind does not.

    Raises TemplateError, HiddenTurn.
    """
    text, spans = render(messages, prompt=False), []
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            span = _by_prefix(render, messages, number, text) or _by_stand_in(render, messages, number, text)
            if span is None:
                raise HiddenTurn(number)
            spans.append(span)
    return text, spans


def _by_prefix(render: Renders, messages: list[Message], number: int, text: str) -> Span | None:
    """None where the conversation up to this turn is not what the whole one begins with."""
    try:
        before = render(messages[:number], prompt=True) if number else ""
        after = render(messages[: number + 1], prompt=False)
        opens = bool(number) and before != render(messages[:number], prompt=False)
    except TemplateError:  # a part of the conversation that the template does not take alone
        return None
    if not after.startswith(before) or not text.startswith(after):
        return None
    first = len(before)
    if not opens:  # the template has no prompt for an answer: its header is no part of it
        span = _by_stand_in(render, messages, number, text)
        first = first if span is None else span[0]
    return first, len(after.rstrip()) if len(after.rstrip()) > first else len(after)


def _by_stand_in(render: Renders, messages: list[Message], number: int, text: str) -> Span | None:
    """The message's own text, and what closes the turn where it is the last one. None where it cannot be told."""
    content = messages[number].get("content")
    if not isinstance(content, str) or not content.strip():
        return None
    stand_in = [*messages[:number], {**messages[number], "content": _STAND_IN}]
    try:
        other = render([*stand_in, *messages[number + 1 :]], prompt=False)
        last = render(stand_in, prompt=False)
    except TemplateError:
        return None
    first, at = other.find(_STAND_IN), last.find(_STAND_IN)
    if first < 0 or at < 0:
        return None
    rest = other[first + len(_STAND_IN) :]
    if not text.startswith(other[:first]) or not text.endswith(rest) or len(text) < first + len(rest):
        return None
    closer = last[at + len(_STAND_IN) :].rstrip()
    return first, len(text) - len(rest) + (len(closer) if rest.startswith(closer) else 0)

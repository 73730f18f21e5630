"""Conversations: rendered by a chat template, with the characters found that the model has to learn to write.

A template with {% generation %} marks says so itself. Without them an assistant's turn is what appears when it is added
to the conversation before it. Templates that render an earlier turn in another way than the last one (reasoning that is
dropped) do not extend their own prefixes: there the turn's text is found by replacing it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt

from shardwright.data.records import Record, missing_field
from shardwright.data.tokenizers import Ids, Tokenizer
from shardwright.data.trouble import refusal
from shardwright.diagnostics import Refusal
from shardwright.ir.json_value import JsonObject, JsonValue

Message = dict[str, JsonValue]
Span = tuple[int, int]
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_STAND_IN = "\u2022stand-in\u2022"
"""Takes the place of an answer; no template looks for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    messages: list[Message]
    tools: JsonValue
    where: str


class Renders(Protocol):
    def __call__(self, messages: list[Message], *, prompt: bool) -> str: ...


def conversation(record: Record, key: str) -> Conversation:
    """Errors: SW6110, SW6111."""
    document, where, _ = record
    if key not in document:
        raise missing_field(where, key, document, "messages")
    given = document[key]
    if not isinstance(given, list) or not given:
        raise refusal("SW6111", f"{where}: the conversation has no messages", "Delete the record, or give it messages.")
    messages: list[Message] = []
    for number, message in enumerate(given, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise refusal(
                "SW6111",
                f"{where}: message {number} has no role",
                'A message is {"role": "user", "content": "..."}; roles are system, user, assistant, tool.',
            )
        # Parquet fills in what a record does not have.
        messages.append({k: v for k, v in cast(JsonObject, message).items() if v is not None or k == "content"})
    return Conversation(messages=messages, tools=document.get("tools"), where=where)


def encode(talk: Conversation, tokenizer: Tokenizer, template: str, train_on: str) -> tuple[Ids, npt.NDArray[np.bool_]]:
    """(ids, trained). Errors: SW6112, SW6113."""
    if train_on == "all":
        text = _render(talk, tokenizer, template)(talk.messages, prompt=False)
        ids = tokenizer.encode([text])[0]
        return ids, np.ones(len(ids), dtype=np.bool_)
    text, spans = _spans(talk, tokenizer, template)
    encoded = tokenizer.encode_with_places(text)
    trained = np.zeros(len(encoded.ids), dtype=np.bool_)
    for first, last in spans:
        # A token that begins before the answer holds more than the answer.
        trained |= (encoded.first >= first) & (encoded.last <= last) & (encoded.last > encoded.first)
    return encoded.ids, trained


def _spans(talk: Conversation, tokenizer: Tokenizer, template: str) -> tuple[str, list[Span]]:
    """The text, and where in it the assistant speaks: its turn's end belongs to it, white space behind does not."""
    if _MARKED.search(template):
        return _render_marked(talk, tokenizer, template)
    render = _render(talk, tokenizer, template)
    text, spans = render(talk.messages, prompt=False), []
    for number, message in enumerate(talk.messages):
        if message["role"] == "assistant":
            span = _by_prefix(render, talk.messages, number, text) or _by_stand_in(render, talk.messages, number, text)
            if span is None:
                raise refusal(
                    "SW6113",
                    f"{talk.where}: the chat template hides where message {number + 1} of the assistant stands",
                    "Put {% generation %} marks around the assistant's text in the template (data.template), or write "
                    "train_on: all.",
                )
            spans.append(span)
    return text, spans


def _by_prefix(render: Renders, messages: list[Message], number: int, text: str) -> Span | None:
    """None where the conversation up to this turn is not what the whole one begins with."""
    try:
        before = render(messages[:number], prompt=True) if number else ""
        after = render(messages[: number + 1], prompt=False)
        opens = bool(number) and before != render(messages[:number], prompt=False)
    except Refusal:  # a part of the conversation that the template does not take alone
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
    except Refusal:
        return None
    first, at = other.find(_STAND_IN), last.find(_STAND_IN)
    if first < 0 or at < 0:
        return None
    rest = other[first + len(_STAND_IN) :]
    if not text.startswith(other[:first]) or not text.endswith(rest) or len(text) < first + len(rest):
        return None
    closer = last[at + len(_STAND_IN) :].rstrip()
    return first, len(text) - len(rest) + (len(closer) if rest.startswith(closer) else 0)


def _render(talk: Conversation, tokenizer: Tokenizer, template: str) -> Renders:
    def render(messages: list[Message], *, prompt: bool) -> str:
        return _run_template(talk, messages, tokenizer, template, prompt=prompt, marks=False)[0]

    return render


def _render_marked(talk: Conversation, tokenizer: Tokenizer, template: str) -> tuple[str, list[Span]]:
    return _run_template(talk, talk.messages, tokenizer, template, prompt=False, marks=True)


def _run_template(
    talk: Conversation, messages: list[Message], tokenizer: Tokenizer, template: str, *, prompt: bool, marks: bool
) -> tuple[str, list[Span]]:
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        rendered, places = render_jinja_template(
            conversations=[messages],
            tools=talk.tools,
            chat_template=template,
            add_generation_prompt=prompt,
            return_assistant_tokens_mask=marks,
            **tokenizer.special(),
        )
    except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:  # what a template's code raises
        roles = ", ".join(str(m["role"]) for m in talk.messages[:6])
        raise refusal(
            "SW6112",
            f"{talk.where}: the chat template refuses the conversation ({roles}): {str(error).splitlines()[0][:200]}",
            "Correct the record (a template without a system role wants its text in the first user message), or give "
            "another template as data.template.",
        ) from None
    return str(rendered[0]), [(int(a), int(b)) for a, b in places[0]] if marks else []


def template_of(tokenizer: Tokenizer, given: str | None) -> str:
    """Errors: SW6112."""
    template = given or tokenizer.template
    if template is None:
        raise refusal(
            "SW6112",
            "the tokenizer has no chat template",
            "Write one as data.template, or take the tokenizer of the model's instruction-tuned sibling.",
        )
    return template

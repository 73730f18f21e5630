"""Reads conversations from records, renders them by a chat template, and marks the tokens that are
labels."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from shardwright.data.chat_format import Message, Span, TemplateError, TurnNotFound
from shardwright.data.chat_messages import normalize_message, normalize_tools
from shardwright.data.chat_template_renderer import ChatTemplateRenderer, RenderLimitExceeded
from shardwright.data.label_check import MissingLabel, check_labels
from shardwright.data.record_counts import RecordCounts
from shardwright.data.source_records import Record, missing_field
from shardwright.data.tokenizers import Ids, Tokenizer
from shardwright.diagnostics import refusal
from shardwright.utils.json_types import JsonObject, JsonValue

_RENDERER = ChatTemplateRenderer()
_ANSWER = "8Kd2vN6jF"


Expand = Callable[[str, list[Span]], tuple[str, list[Span]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    messages: list[Message]
    tools: JsonValue
    where: str


def conversation(record: Record, key: str) -> Conversation:
    """Reads the messages under `key` of a record. Errors: SW6110, SW6111."""
    document, where, _ = record
    if key not in document:
        raise missing_field(where, key, document, "messages")
    given = document[key]
    if not isinstance(given, list) or not given:
        raise refusal(
            "SW6111",
            f"{where}: the conversation has no messages",
            "Delete the record, or give it messages.",
        )
    messages: list[Message] = []
    for number, message in enumerate(given, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise refusal(
                "SW6111",
                f"{where}: message {number} has no role",
                (
                    'A message is {"role": "user", "content": "..."}; roles are system, user, '
                    "assistant, tool."
                ),
            )
        messages.append(normalize_message(dict(cast(JsonObject, message))))
        if message.get("content") is None and not messages[-1].get("tool_calls"):
            raise refusal(
                "SW6111",
                f"{where}: message {number} ({str(message['role'])[:40]}) has no content",
                (
                    'A message is {"role": "user", "content": "..."}; an answer without text is '
                    'written "".'
                ),
            )
    return Conversation(
        messages=messages, tools=normalize_tools(document.get("tools")), where=where
    )


def encode(
    talk: Conversation,
    tokenizer: Tokenizer,
    template: str,
    train_on: str,
    expand: Expand | None = None,
    report: RecordCounts | None = None,
) -> tuple[Ids, npt.NDArray[np.bool_]]:
    """Returns (ids, which of them are labels).

    expand: of a vision-language model, writes images out in the text. report: counts the
    conversation.

    Errors: SW6112, SW6113, and SW6124 where something that the assistant said is no label.
    """
    whose = (
        "the tokenizer's chat template"
        if template == tokenizer.template
        else "the chat template (data.template)"
    )
    turns = train_on != "all"
    try:
        text, spans, is_open = _RENDERER.render(
            template, talk.messages, talk.tools, tokenizer.special(), turns=turns
        )
    except TurnNotFound as hidden:
        raise refusal(
            "SW6113",
            (
                f"{talk.where}: {whose} hides where message {hidden.args[0] + 1} of the "
                "assistant stands"
            ),
            "Put {% generation %} marks around the assistant's text in the template "
            "(data.template), or write train_on: all.",
        ) from None
    except TemplateError as error:
        roles = ", ".join(str(m["role"])[:40] for m in talk.messages[:6])
        raise refusal(
            "SW6112",
            f"{talk.where}: {whose} refuses the conversation ({roles}): {error}",
            "Correct the record (a template without a system role wants its text in the first user "
            "message), or give another template as data.template.",
        ) from None
    except RenderLimitExceeded as error:
        raise refusal(
            "SW6112",
            f"{talk.where}: {whose} was ended: {error}",
            (
                "No template needs that much. Give another one as data.template, or take the "
                "record out."
            ),
        ) from None
    try:
        if turns and not check_labels(talk.messages, text, spans) and report is not None:
            report.reasoning_not_rendered += 1
    except MissingLabel as lost:
        raise refusal(
            "SW6124",
            f"{talk.where}: {lost.args[0]}",
            "Give a template that writes it as data.template, or take it out of the record; "
            "`skip_damaged: 0.01` leaves out up to that share of the records, and `prepare` counts "
            "them.",
        ) from None
    if turns and report is not None:
        report.unclosed_conversations += is_open
    if expand is not None:
        text, spans = expand(text, spans)
    if not turns:
        ids = tokenizer.encode([text])[0]
        return ids, np.ones(len(ids), dtype=np.bool_)
    encoded = tokenizer.encode_with_offsets(text)
    trained = np.zeros(len(encoded.ids), dtype=np.bool_)
    for first, last in spans:
        # Whatever holds a character of the turn: "▁Yes" begins with the space in front of the
        # answer. GPT-2's tokens do not count the spaces that they begin with: one of spaces alone
        # has no characters.
        empty = encoded.first == encoded.last
        trained |= (encoded.first < last) & (encoded.last > first)
        trained |= empty & (encoded.first > first) & (encoded.last <= last)
    return encoded.ids, trained


def resolve_chat_template(tokenizer: Tokenizer, given: str | None) -> str:
    """Returns the recipe's template, or the tokenizer's own. Errors: SW6112."""
    template = given or tokenizer.template
    if not isinstance(template, str):
        raise refusal(
            "SW6112",
            "the tokenizer has no chat template",
            (
                "Write one as data.template, or take the tokenizer of the model's "
                "instruction-tuned sibling."
            ),
        )
    return template


def end_of_turn_id(tokenizer: Tokenizer, template: str) -> int | None:
    """The id of the token that ends an answer and is trained with it: <|im_end|>, <|eot_id|>, often
    the tokenizer's eos_token. None where the answer's end is no token of its own, or the template
    leaves it out of what is trained."""
    for messages in _sample_answers():
        try:
            text, spans, _ = _RENDERER.render(
                template, messages, None, tokenizer.special(), turns=True
            )
        except (
            TurnNotFound,
            TemplateError,
            RenderLimitExceeded,
        ):  # a template may want a system message, or parts for the content
            continue
        place = text.rfind(_ANSWER)
        tail = next(
            (text[place + len(_ANSWER) : last] for first, last in spans if first <= place < last),
            "",
        )
        tokens = [int(token) for token in tokenizer.encode([tail])[0]] if tail else []
        if (
            end := next(
                (token for token in reversed(tokens) if tokenizer.is_special_token(token)), None
            )
        ) is not None:
            return end
    return None


def _sample_answers() -> Iterator[list[Message]]:
    """Conversations that hold one answer. It comes last, as gpt-oss ends that turn alone with
    <|return|>; then, for templates that end a turn with the next role's token (GLM's <|user|>), a
    question follows."""
    for follows, instructed, in_parts in itertools.product((False, True), repeat=3):
        said = [("user", "hi"), ("assistant", _ANSWER)] + [("user", "hi")] * follows
        yield [
            {
                "role": role,
                "content": cast(JsonValue, [{"type": "text", "text": text}]) if in_parts else text,
            }
            for role, text in [("system", "hi")] * instructed + said
        ]

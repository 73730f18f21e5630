"""Checks that what the assistant said is in the text that a chat template made, as labels."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from shardwright.data.chat_format import Message, Span
from shardwright.utils.json_types import JsonObject, JsonValue

REASONING = ("reasoning_content", "reasoning", "thinking")


ExpectedLabel = tuple[str, str, tuple[str, ...]]
"""Holds what a model has to learn: (the reason that it is counted under where it is lost, in words,
how it may be written)."""


class MissingLabel(Exception):
    """Says that a part of the conversation is no label. args: which, in words; the reason that it
    is counted under."""


def check_labels(messages: list[Message], text: str, spans: Sequence[Span]) -> bool:
    """Says whether all reasoning is a label, too.

    Raises MissingLabel where an answer or a call is no label, or is written as Python prints it.
    """
    for number, message in enumerate(messages, 1):
        content = message.get("content")
        if content and isinstance(content, list | dict) and str(content) in text:
            raise MissingLabel(
                f"message {number}: the chat template writes the content as Python prints it",
                "printed",
            )
    answers = [
        (number, message)
        for number, message in enumerate(messages, 1)
        if message["role"] == "assistant"
    ]
    turns = [text[first:last] for first, last in spans]
    trained, at = "\n".join(turns), 0
    try:
        for number, message in answers:
            at = _find_message(number, message, trained, at)
    except MissingLabel:
        if len(turns) == len(
            answers
        ):  # a later turn that holds the same words has stood in for the one that lacks them
            for (number, message), turn in zip(answers, turns, strict=True):
                _find_message(number, message, turn, 0)
        raise
    reasoning = [
        value
        for _, message in answers
        for key in REASONING
        if isinstance(value := message.get(key), str)
    ]
    return all(value.strip() in trained for value in reasoning)


def _find_message(number: int, message: Message, trained: str, at: int) -> int:
    """Returns where the message ends in `trained`, which has it at `at` or later. Raises
    MissingLabel.

    The text stands beside the calls, and each call's name by itself: a text that speaks of the
    weather is no call of `weather`. Long ones have the first choice.
    """
    taken: list[tuple[str, int, int]] = []
    for reason, words, forms in sorted(_expected_labels(message), key=_by_length):
        others = [
            (a, b)
            for other, a, b in taken
            if "text" in (reason, other) or reason == other == "call"
        ]
        place, size = _find(trained, forms, at, others)
        if place < 0:
            ids = (
                str(call.get("id"))
                for call, _ in _calls(message)
                if isinstance(call, dict) and call.get("id")
            )
            found = next((own for own in ids if reason == "call" and own in trained), None)
            by_id = (
                "" if found is None else f": it names a call by its id alone, here {_short(found)}"
            )
            raise MissingLabel(
                f"message {number}: the chat template does not write {words} as a label{by_id}",
                reason,
            )
        taken.append((reason, place, place + size))
    for _, function in _calls(message):
        printed = (
            str(function.get("arguments")) if isinstance(function.get("arguments"), dict) else ""
        )
        if (
            len(printed) > len("{}")
            and trained.find(printed, at) >= 0
            and printed not in str(message.get("content"))
        ):
            words = "the chat template writes a call's arguments as Python prints them"
            raise MissingLabel(f"message {number}: {words}", "printed")
    return max((last for _, _, last in taken), default=at)


def _by_length(answers: ExpectedLabel) -> tuple[int, bool]:
    """Sorts the longest first, and of equal ones the text last."""
    return -max(map(len, answers[2]), default=0), answers[0] == "text"


def _find(trained: str, forms: tuple[str, ...], at: int, others: list[Span]) -> Span:
    """Returns (place, size) of the first form that stands beside the others; (-1, 0) for none."""
    for form in forms:
        place = trained.find(form, at)
        while place >= 0 and any(
            place < last and first < place + len(form) for first, last in others
        ):
            place = trained.find(form, place + 1)
        if place >= 0:
            return place, len(form)
    return -1, 0


def _expected_labels(message: Message) -> Iterator[ExpectedLabel]:
    """Yields each thing that the model has to learn of a message."""
    for content in _texts(message.get("content")):
        # Reasoning in front of the answer may be left out, and the white space around both.
        answer = content.rsplit("</think>", 1)[-1]
        for mark in ("<answer>", "</answer>"):
            answer = answer.replace(mark, "")
        if answer.strip():
            yield (
                "text",
                f"the text {_short(content)}",
                (content.strip(), answer.strip(), _escaped(answer.strip())),
            )
    for call, function in _calls(message):
        name = function.get("name")
        words = (
            f"the call of {_short(str(name))}" if name else f"the call {_short(json.dumps(call))}"
        )
        yield "call", words, (str(name),) if name else ()
        for value in _leaves(function.get("arguments")):
            yield (
                "arguments",
                f"the argument {_short(value)} of {_short(str(name))}",
                (value, _escaped(value)),
            )


def _calls(message: Message) -> Iterator[tuple[JsonValue, JsonObject]]:
    """Yields (a call, its function); of something that is no call, an empty one."""
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        yield call, function if isinstance(function, dict) else {}


def _texts(content: JsonValue) -> list[str]:
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, list) else []
    texts = (part.get("text") if isinstance(part, dict) else part for part in parts)
    return [text for text in texts if isinstance(text, str)]


def _leaves(value: JsonValue) -> Iterator[str]:
    if isinstance(value, dict):
        for key, below in value.items():
            yield key
            yield from _leaves(below)
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, str):
        if value.strip():
            yield value.strip()
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield json.dumps(value)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")

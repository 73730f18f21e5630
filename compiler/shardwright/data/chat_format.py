"""Find the characters of a rendered conversation that the model has to learn to write.

A template with {% generation %} marks tells them. Otherwise a turn starts where the prompt for an
answer (add_generation_prompt) ends, and ends with what is between the answer and the next prompt.
Both are found by rendering the conversation with a sentinel in place of one message's text. So a
template may write earlier turns differently, and tool results inside a turn.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol, cast

from shardwright.utils.json_values import JsonObject, JsonValue

Message = dict[str, JsonValue]
Span = tuple[int, int]
GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
SENTINEL = "0Zq7xW4vK"
"""Takes the place of a message's text, or a call's name, arguments or id (Mistral's have nine
characters)."""
_ANSWER = "1Yp5uT3sR"
_UNIT = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]|\w+|.", re.DOTALL)
"""Texts are compared by tokens like <|im_end|> and by words: <|end|> and <|endoftext|> differ from
the start."""
_ROLE_TOKEN = re.compile(r"\s*<[^<>\s]+>")


class TemplateError(Exception):
    """Holds the template's own message, or what its code raises."""


class TurnNotFound(Exception):
    """An answer cannot be found in the text.

    args: its number among the messages, from 0.
    """


class MessageRenderer(Protocol):
    """Render messages by a template. Raises TemplateError."""

    def __call__(self, messages: list[Message], *, prompt: bool) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnFormat:
    """Describe how a template writes turns.

    prompts: whether add_generation_prompt writes something.
    header: text before an answer: the prompt, or what the template writes there by itself.
    end: text that closes a turn, without trailing white space; "" where the next role's token
        closes it, None where unknown.
    """

    prompts: bool
    header: str
    end: str | None


def detect_turn_format(render: MessageRenderer) -> TurnFormat:
    """Detect the format by one question and its answer."""
    question: list[Message] = [{"role": "user", "content": SENTINEL}]
    answered: list[Message] = [*question, {"role": "assistant", "content": _ANSWER}]
    try:
        closed, opened = (_text_after(render(question, prompt=prompt)) for prompt in (False, True))
        text, prompted = (render(answered, prompt=prompt) for prompt in (False, True))
    except TemplateError:  # it needs a system message, or tools
        return TurnFormat(prompts=False, header="", end=None)
    between, tail = _text_after(text), _text_after(prompted, _ANSWER)
    if closed is None or opened is None or between is None or tail is None:
        return TurnFormat(prompts=False, header="", end=None)
    header = opened[_common_prefix_length(closed, opened) :]
    if header:
        end = tail[: -len(header)].rstrip() if tail.endswith(header) else None
        return TurnFormat(prompts=True, header=header, end=end)
    between = between[: between.rfind(_ANSWER)]
    own = between[len(opened) :] if between.startswith(opened) else ""
    return TurnFormat(prompts=False, header=own if own.strip() else "", end=tail.rstrip())


def find_turns(
    render: MessageRenderer, messages: list[Message], shape: TurnFormat
) -> tuple[str, list[Span]]:
    """Return the text and the assistant's spans, each with the turn's end, without white space
    after it.

    Raises TemplateError, TurnNotFound.
    """
    turns = _Turns(render, messages, shape)
    return turns.text, [
        span
        for n, message in enumerate(messages)
        if message["role"] == "assistant"
        for span in turns.of(n)
    ]


class _Turns:
    def __init__(self, render: MessageRenderer, messages: list[Message], shape: TurnFormat) -> None:
        self.render, self.messages, self.shape = render, messages, shape
        self.text = render(messages, prompt=False)
        marks = (f"{number}{SENTINEL[1:]}" for number in itertools.count())
        self.mark = next(mark for mark in marks if mark not in self.text)
        self._others: dict[tuple[int, int], str] = {}

    def _with_sentinel(self, number: int) -> Iterator[tuple[Message, str]]:
        """Yield (message with the sentinel, rendered text) for each place where the sentinel is
        visible."""
        for place, other in enumerate(_with_sentinel(self.messages[number], self.mark)):
            if self._contents is not None:
                first, last = self._contents[number]
                yield other, self.text[:first] + self.mark + self.text[last:]
                continue
            key = number, place
            if key not in self._others:  # only the next turn needs it again
                self._others = {
                    known: text for known, text in self._others.items() if known[0] >= number - 1
                }
                replaced = [*self.messages[:number], other, *self.messages[number + 1 :]]
                self._others[key] = self._try(replaced, prompt=False)
            if self.mark in self._others[key]:
                yield other, self._others[key]

    @functools.cached_property
    def _contents(self) -> list[Span] | None:
        """Find each message's content by one rendering with a sentinel for each.

        None unless the text is that rendering with the contents, stripped or not, in place of the
        sentinels. Every message then has only text content and no calls.
        """
        contents = [message.get("content") for message in self.messages]
        texts = [content for content in contents if isinstance(content, str) and content.strip()]
        if len(texts) < len(self.messages) or any(
            "tool_calls" in message for message in self.messages
        ):
            return None
        marks = [f"{self.mark}x{number}x" for number in range(len(texts))]
        marked = self._try(
            [{**m, "content": mark} for m, mark in zip(self.messages, marks, strict=True)],
            prompt=False,
        )
        spans: list[Span] = []
        at = 0  # place in the text
        for mark, content in zip(marks, texts, strict=True):
            literal, there, marked = marked.partition(mark)
            first = at + len(literal)
            follows = marked.partition(self.mark)[0]
            forms = (content, content.strip(), content.lstrip(), content.rstrip())
            fits = (form for form in forms if self.text.startswith(form + follows, first))
            form = next(fits, None)
            if not there or form is None or not self.text.startswith(literal, at):
                return None
            at = first + len(form)
            spans.append((first, at))
        return spans if self.text[at:] == marked else None

    def of(self, number: int) -> list[Span]:
        """Return the turn's spans; none where the template leaves it out."""
        extends = self._appended_turn(number)
        if extends is not None:
            return [extends]
        begins = self._first_changed_character(number)
        if begins is None:
            raise TurnNotFound(number)
        first, last = self._begin(number, begins), self._end(number)
        if last is None:
            raise TurnNotFound(number)
        return self._without_results(number, first, last) if last > first else []

    def _without_results(self, number: int, first: int, last: int) -> list[Span]:
        """Remove tool results that follow the turn in the conversation and are written inside
        it."""
        messages, behind = self.messages, number + 1
        while behind < len(messages) and messages[behind]["role"] not in ("assistant", "user"):
            behind += 1
        inside = False
        for result in range(number + 1, behind):
            begins = self._first_changed_character(result)
            inside = inside or (begins is not None and first <= begins < last)
        if not inside:
            return [(first, last)]
        others = self._try([*messages[: number + 1], *messages[behind:]], prompt=False)
        begins = _common_prefix_length(self.text, others)
        same = _equal_character_count(self.text[begins:][::-1], others[begins:][::-1])
        return [
            span
            for span in ((first, min(begins, last)), (len(self.text) - same, last))
            if span[1] > span[0]
        ]

    def _appended_turn(self, number: int) -> Span | None:
        """Return the turn where the text continues the prompt for it with its text and end, else
        None."""
        shape = self.shape
        if not (number and shape.end):
            return None
        try:
            before = self.render(self.messages[:number], prompt=True)
            is_last = number == len(self.messages) - 1
            after = self.text if is_last else self.render(self.messages[: number + 1], prompt=False)
        except TemplateError:  # the template refuses a part of the conversation
            return None
        if not shape.prompts:
            before += shape.header
        if not (
            self.text.startswith(after)
            and after.startswith(before)
            and before.endswith(shape.header)
        ):
            return None
        after = after.rstrip()
        return (
            (len(before), len(after))
            if after.endswith(shape.end) and len(after) > len(before)
            else None
        )

    def _begin(self, number: int, begins: int) -> int:
        """Return where the prompt for this turn ends.

        begins: where the turn's own text starts, at the latest.
        """
        header = self.shape.header
        start = 0
        for other, text in self._with_sentinel(number - 1) if number else ():
            after, tail = (
                _text_after(text, self.mark),
                self._text_after([*self.messages[: number - 1], other], prompt=True),
            )
            if after is None or tail is None or not self.text.endswith(after):
                continue
            tail += "" if self.shape.prompts else header
            start = len(self.text) - len(after)
            if after.startswith(tail):
                first = start + len(tail)
                # DeepSeek V3 writes no header after a result, but one before the next call.
                late = (
                    self.text.find(header, first, begins)
                    if header.strip() and not tail.endswith(header)
                    else -1
                )
                return first if late < 0 else late + len(header)
            break
        # The prompt differs from what is written here, or a first message has none.
        gap = self.text[start:begins]
        for size in reversed([unit.end() for unit in _UNIT.finditer(header)]):
            if header[:size].strip() and header[:size] in gap:
                return start + gap.rindex(header[:size]) + size
        return begins

    def _first_changed_character(self, number: int) -> int | None:
        """Return the first character that differs where the message is."""
        for _, text in self._with_sentinel(number):
            place = text.find(self.mark)
            return (
                place
                if self.text.startswith(text[:place])
                else _equal_character_count(self.text, text)
            )
        return None

    def _end(self, number: int) -> int | None:
        """Return where the turn ends, None where that cannot be found."""
        shape, messages = self.shape, self.messages
        is_last = number + 1 == len(messages)
        for other, text in self._with_sentinel(number):
            after = _text_after(text, self.mark) or ""
            # The text between the message's own and the prompt for the next answer.
            until_here = [*messages[:number], other]
            tail = self._text_after(until_here, prompt=True)
            if tail is not None and shape.prompts:
                if tail.endswith(shape.header):
                    tail = tail.removesuffix(shape.header)
                else:
                    tail = self._text_after(until_here, prompt=False)
            closing = tail or ""
            if after.startswith(closing.rstrip()):
                size = len(closing.rstrip())
            elif is_last:  # the last turn is closed differently
                size = len(after.rstrip())
            else:
                size = len(after[: _common_prefix_length(after, closing)].rstrip())
                if not size and shape.end:  # other text before the turn's end
                    follows = self._first_changed_character(number + 1)
                    if follows is not None:
                        gap = after[: follows - len(self.text) + len(after)]
                        if shape.end in gap:
                            size = gap.find(shape.end) + len(shape.end)
            if not self.text.endswith(after[size:]):
                continue
            last = len(self.text) - len(after) + size
            if shape.end == "" and not is_last and messages[number + 1]["role"] != "assistant":
                # The next role's token closes the turn.
                follows = self._first_changed_character(number + 1)
                if follows is not None:
                    token = _ROLE_TOKEN.match(self.text, last, follows)
                    last = last if token is None else token.end()
            return last
        return None

    def _text_after(self, messages: list[Message], *, prompt: bool) -> str | None:
        return _text_after(self._try(messages, prompt=prompt), self.mark)

    def _try(self, messages: list[Message], *, prompt: bool) -> str:
        """Render the messages; "" where the template refuses them."""
        try:
            return self.render(messages, prompt=prompt)
        except TemplateError:
            return ""


def _with_sentinel(message: Message, mark: str) -> Iterator[Message]:
    """Yield the message with another text; then with other arguments, and other names, of all its
    calls."""
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, str):
        yield {**message, "content": mark}
    elif isinstance(content, list):
        for place, part in enumerate(content):
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                yield {
                    **message,
                    "content": [*content[:place], {**part, "text": mark}, *content[place + 1 :]],
                }
                break
    if (
        isinstance(calls, list)
        and calls
        and all(isinstance(c, dict) and isinstance(c.get("function"), dict) for c in calls)
    ):
        known = cast("list[dict[str, dict[str, JsonValue]]]", calls)
        arguments: JsonValue = {mark: mark}
        if isinstance(known[-1]["function"].get("arguments"), str):
            arguments = json.dumps(arguments)
        yield {
            **message,
            "tool_calls": [
                {**c, "function": {**c["function"], "arguments": arguments}} for c in known
            ],
        }
        named = [{**c, "id": mark, "function": {**c["function"], "name": mark}} for c in known]
        yield {**message, "tool_calls": cast(JsonValue, named)}


def _text_after(text: str, mark: str = SENTINEL) -> str | None:
    place = text.rfind(mark)
    return None if place < 0 else text[place + len(mark) :]


def _common_prefix_length(one: str, other: str) -> int:
    """Count the characters of the common prefix, in complete units."""
    size = 0
    for a, b in zip(_UNIT.finditer(one), _UNIT.finditer(other), strict=False):
        if a[0] != b[0]:
            break
        size = a.end()
    return size


def _equal_character_count(one: str, other: str) -> int:
    return next(
        (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


# Normalizing a record's messages, and converting them to the form that a chat template takes.
# Records write text as a string, as parts or as null; a call's arguments as an object or as JSON
# text; a call with or without `function`. A template knows one form, and drops or prints the
# others.


_TEXT_PARTS = (None, "text", "input_text", "output_text")


_KIMI_CALL = f"<|tool_call_begin|>{SENTINEL}<|tool_call_argument_begin|>"
"""Holds what Kimi K2's template writes of a call with this id, functions.NAME:INDEX; the name is
nowhere else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageFormat:
    """Describe the form that a template takes.

    parts: content as a list of parts, never a string.
    arguments_as_text: a call's arguments as JSON text, never an object.
    kimi_ids: calls named by ids in Kimi K2's form.
    """

    parts: bool = False
    arguments_as_text: bool = False
    kimi_ids: bool = False

    def convert_conversation(self, messages: list[Message]) -> list[Message]:
        """Return normalized messages in the template's form."""
        messages = [self.of(message) for message in messages]
        return _with_kimi_ids(messages) if self.kimi_ids else messages

    def of(self, message: Message) -> Message:
        """Return one message in the template's form, without the ids of calls, which count through
        a conversation."""
        content, calls = message.get("content"), message.get("tool_calls")
        if self.parts and isinstance(content, str):
            message = {**message, "content": [{"type": "text", "text": content}]}
        if self.arguments_as_text and isinstance(calls, list):
            written: list[JsonValue] = []
            for call in calls:
                function = call.get("function") if isinstance(call, dict) else None
                if isinstance(call, dict) and isinstance(function, dict):
                    arguments = function.get("arguments")
                    if not isinstance(arguments, str):
                        arguments = json.dumps(arguments, ensure_ascii=False)
                    call = {**call, "function": {**function, "arguments": arguments}}
                written.append(call)
            message = {**message, "tool_calls": written}
        return message


def detect_message_format(render: MessageRenderer) -> MessageFormat:
    """Detect the form by what the template writes of a text, a call's arguments and its id."""

    def shows(
        form: MessageFormat, messages: list[Message], printed: str = "", what: str = SENTINEL
    ) -> bool:
        try:
            text = render([form.of(message) for message in messages], prompt=False)
        except TemplateError:
            return False
        return what in text and not (printed and printed in text)

    asked: Message = {"role": "user", "content": SENTINEL}
    parts = not shows(MessageFormat(), [asked]) and shows(MessageFormat(parts=True), [asked])
    function: JsonValue = {"name": "name", "arguments": {"key": SENTINEL}}
    call: Message = {"id": "abcdefghi", "type": "function", "function": function}
    talk: list[Message] = [
        {**asked, "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    by_python = str({"key": SENTINEL})
    as_text = not shows(MessageFormat(parts=parts), talk, by_python) and shows(
        MessageFormat(parts=parts, arguments_as_text=True), talk, by_python
    )
    form = MessageFormat(parts=parts, arguments_as_text=as_text)
    named: Message = {**talk[1], "tool_calls": [{**call, "id": SENTINEL}]}
    return replace(form, kimi_ids=shows(form, [talk[0], named], what=_KIMI_CALL))


def normalize_message(message: Message) -> Message:
    """Return a message in one form.

    Text-only content is a string; each call is {"function": {"name", "arguments"}} with arguments
    as an object where possible; keys without a value are dropped.
    """
    message = {key: value for key, value in message.items() if value is not None}
    message["content"] = _text(message.get("content", ""))
    called = message.pop("function_call", None)  # OpenAI's older form of one call
    calls = message.get("tool_calls") or ([{"function": called}] if called else None)
    if isinstance(calls, str):
        calls = _parsed(calls)
    if isinstance(calls, dict):
        calls = [calls]
    if isinstance(calls, list) and calls:
        message["tool_calls"] = [_normal_call(call) for call in calls]
    elif not calls:
        message.pop("tool_calls", None)
    return message


def normalize_tools(tools: JsonValue) -> JsonValue:
    """Return a list of objects, also where they are JSON text; None for no tools."""
    if isinstance(tools, str):
        tools = _parsed(tools)
    if isinstance(tools, list):
        return [_parsed(tool) if isinstance(tool, str) else tool for tool in tools] or None
    return tools or None


def drop_nulls(value: JsonValue) -> JsonValue:
    """Drop keys with a null value: Arrow gives every object of a column the keys of all."""
    if isinstance(value, dict):
        return {key: drop_nulls(below) for key, below in value.items() if below is not None}
    return [drop_nulls(item) for item in value] if isinstance(value, list) else value


def _text(content: JsonValue) -> JsonValue:
    """Join content that is a list of text parts; other content stays."""
    if not isinstance(content, list):
        return content
    texts: list[str] = []
    for part in content:
        if (
            isinstance(part, dict)
            and part.get("type") in _TEXT_PARTS
            and not {"image", "image_url"} & set(part)
        ):
            part = part.get("text")
        if not isinstance(part, str):
            return content
        texts.append(part)
    return "".join(texts)


def _normal_call(call: JsonValue) -> JsonValue:
    if isinstance(call, str):
        call = _parsed(call)
    if not isinstance(call, dict):
        return call
    call = {key: value for key, value in call.items() if value is not None}
    if "function" not in call and "name" in call:
        own = ("name", "arguments", "parameters")
        function: JsonObject = {key: call[key] for key in own if key in call}
        call = {
            **{key: value for key, value in call.items() if key not in own},
            "function": function,
        }
    function_ = call.get("function")
    if not isinstance(function_, dict):
        return call
    known = {key: value for key, value in function_.items() if value is not None}
    parameters = known.pop("parameters", None)  # Llama's word for them
    arguments = known.get("arguments", parameters)
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}
    parsed = arguments
    while isinstance(parsed, str) and (inner := _parsed(parsed)) != parsed:
        parsed = inner
    named = {**known, "arguments": parsed if isinstance(parsed, dict) else arguments}
    return {**call, "type": call.get("type", "function"), "function": named}


def _with_kimi_ids(messages: list[Message]) -> list[Message]:
    """Give each call the id functions.NAME:INDEX, counted over the conversation, and each result
    its call's id.

    A result is matched by the old id, or by order where it has none. Messages that have such ids
    already, or malformed calls, stay unchanged.
    """
    every = [
        cast(JsonObject, call)
        for m in messages
        for call in cast("list[JsonValue]", m.get("tool_calls") or [])
    ]
    if not all(isinstance(call, dict) and isinstance(call.get("function"), dict) for call in every):
        return messages
    names = [str(cast(JsonObject, call["function"]).get("name")) for call in every]
    ids = zip(names, every, strict=True)
    if all(
        re.fullmatch(rf"functions\.{re.escape(name)}:\d+", str(call.get("id")))
        for name, call in ids
    ):
        return messages
    new_ids = iter([f"functions.{name}:{index}" for index, name in enumerate(names)])
    out: list[Message] = []
    unanswered: list[tuple[str | None, str]] = []  # (old id of a call, new id)
    for message in messages:
        if calls := cast("list[JsonObject]", message.get("tool_calls") or []):
            named: list[JsonValue] = [{**call, "id": next(new_ids)} for call in calls]
            unanswered = [
                (_id_of(a.get("id")), str(cast(JsonObject, b)["id"]))
                for a, b in zip(calls, named, strict=True)
            ]
            message = {**message, "tool_calls": named}
        elif message["role"] == "tool":
            own = _id_of(message.get("tool_call_id"))
            call = next((call for call in unanswered if own in (None, call[0])), None)
            if call is not None:
                unanswered.remove(call)
                message = {**message, "tool_call_id": call[1]}
        out.append(message)
    return out


def _id_of(value: JsonValue) -> str | None:
    return None if value is None else str(value)


def _parsed(text: str) -> JsonValue:
    """Return the value of the JSON text, or the text itself where it is not JSON."""
    try:
        return cast(JsonValue, json.loads(text))
    except (ValueError, RecursionError):
        return text

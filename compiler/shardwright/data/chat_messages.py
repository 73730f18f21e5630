"""Brings the messages of a record into one form, and that into the form that a chat template takes.

Records write the same thing in several ways: text as a string or as a list of parts, no text as
null, a call's arguments as an object or as JSON text, a call with or without `function` around it.
A template knows one of them, and makes nothing, or Python's print, of the others.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import cast

from shardwright.data.chat_format import SENTINEL, Message, MessageRenderer, TemplateError
from shardwright.utils.json_types import JsonObject, JsonValue

_TEXT_PARTS = (None, "text", "input_text", "output_text")


_KIMI_CALL = f"<|tool_call_begin|>{SENTINEL}<|tool_call_argument_begin|>"
"""What Kimi K2's template writes of a call with this id: the name is nowhere else, the id is
functions.NAME:INDEX."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageFormat:
    """Says what a template takes. parts: content as a list of parts, never a string.
    arguments_as_text: a call's arguments as JSON text, never an object. kimi_ids: calls named by
    ids in Kimi K2's form."""

    parts: bool = False
    arguments_as_text: bool = False
    kimi_ids: bool = False

    def convert_conversation(self, messages: list[Message]) -> list[Message]:
        """Returns the messages in the template's form. messages: as `normalize_message` makes
        them."""
        messages = [self.of(message) for message in messages]
        return _with_kimi_ids(messages) if self.kimi_ids else messages

    def of(self, message: Message) -> Message:
        """Returns one message in the template's form, but for the ids of calls, which count through
        a conversation."""
        content, calls = message.get("content"), message.get("tool_calls")
        if self.parts and isinstance(content, str):
            message = {**message, "content": [{"type": "text", "text": content}]}
        if self.arguments_as_text and isinstance(calls, list):
            message = {**message, "tool_calls": [_with_text_arguments(call) for call in calls]}
        return message


def detect_message_format(render: MessageRenderer) -> MessageFormat:
    """Finds the form by what the template writes of a text, and of a call's arguments and id."""

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
    """Returns text as a string where it is text alone, "" for none; each call as {"function":
    {"name", "arguments"}} with arguments as an object where they are one. Keys without a value are
    left out."""
    message = {key: value for key, value in message.items() if value is not None}
    message["content"] = _text(message.get("content", ""))
    called = message.pop("function_call", None)  # OpenAI's older form, of one call
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
    """Returns a list of objects, also where they are JSON text, as in many data sets. None for no
    tools."""
    if isinstance(tools, str):
        tools = _parsed(tools)
    if isinstance(tools, list):
        return [_parsed(tool) if isinstance(tool, str) else tool for tool in tools] or None
    return tools or None


def drop_nulls(value: JsonValue) -> JsonValue:
    """Leaves out keys whose value is null: Arrow makes one struct of all objects in a column, with
    each one's keys."""
    if isinstance(value, dict):
        return {key: drop_nulls(below) for key, below in value.items() if below is not None}
    return [drop_nulls(item) for item in value] if isinstance(value, list) else value


def _text(content: JsonValue) -> JsonValue:
    if not isinstance(content, list):
        return content
    texts = [_part_text(part) for part in content]
    return content if None in texts else "".join(cast("list[str]", texts))


def _part_text(part: JsonValue) -> str | None:
    """Returns the text of a part; None for an image, or whatever is no text."""
    if isinstance(part, str):
        return part
    known = (
        isinstance(part, dict)
        and part.get("type") in _TEXT_PARTS
        and not {"image", "image_url"} & set(part)
    )
    text = part.get("text") if known and isinstance(part, dict) else None
    return text if isinstance(text, str) else None


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
    named = {**known, "arguments": _object(known.get("arguments", parameters))}
    return {**call, "type": call.get("type", "function"), "function": named}


def _object(arguments: JsonValue) -> JsonValue:
    """Returns an object where they are one, or JSON text of one, or of such text; an empty one for
    none."""
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    found: JsonValue = arguments
    while isinstance(found, str) and (inner := _parsed(found)) != found:
        found = inner
    return found if isinstance(found, dict) else arguments


def _with_text_arguments(call: JsonValue) -> JsonValue:
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        return call
    function = cast(JsonObject, call["function"])
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def _with_kimi_ids(messages: list[Message]) -> list[Message]:
    """Gives each call the id functions.NAME:INDEX, with the index counting the conversation's calls
    from 0, and results the id of their call, found by the id that both have had, or by their order
    where a result has none.

    Messages whose calls all have such ids stay as they are; so do those with a call that is none.
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
    unanswered: list[tuple[str | None, str]] = []  # (id that a call has had, its new one)
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
    """Returns what the JSON text says; the text itself where it is no JSON."""
    try:
        return cast(JsonValue, json.loads(text))
    except (ValueError, RecursionError):
        return text

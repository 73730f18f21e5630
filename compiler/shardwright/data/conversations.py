"""Read conversations from records, render them by a chat template, and mark the labels."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt

from shardwright.data.chat_format import (
    Message,
    Span,
    TemplateError,
    TurnNotFound,
    normalize_message,
    normalize_tools,
)
from shardwright.data.chat_template import ChatTemplateRenderer, RenderLimitExceeded
from shardwright.data.image_files import (
    DamagedImage,
    ImageWriter,
    extract_images,
    inspect_image,
)
from shardwright.data.image_inputs import ImageProcessor
from shardwright.data.indexed_dataset import DocumentWriter
from shardwright.data.source_files import (
    ReadingProgress,
    Record,
    RecordCounts,
    missing_field,
    records,
)
from shardwright.data.tokenizers import Ids, Tokenizer
from shardwright.diagnostics import Refusal, refusal
from shardwright.recipe.recipe_types import DataSection
from shardwright.utils.json_values import JsonObject, JsonValue

# Checks that the rendered text holds everything that the assistant said, as labels.


REASONING = ("reasoning_content", "reasoning", "thinking")


ExpectedLabel = tuple[str, str, tuple[str, ...]]
"""(reason counted where it is missing, its description, the ways it may be written)"""


class MissingLabel(Exception):
    """A part of the conversation is not a label.

    args: its description, and the reason that it is counted under.
    """


def check_labels(messages: list[Message], text: str, spans: Sequence[Span]) -> bool:
    """Return whether all reasoning is a label too.

    Raises MissingLabel where an answer or a call is not a label, or is printed as Python.
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
        # A later turn with the same words may have matched: find the turn that lacks them.
        if len(turns) == len(answers):
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
    """Return where the message ends in `trained`, searched from `at`. Raises MissingLabel.

    The text stands beside the calls, and each call's name by itself: a text about the weather is no
    call of `weather`. Longer texts are placed first.
    """
    taken: list[tuple[str, int, int]] = []
    # The longest first, and among equals the text last.
    ordered = sorted(
        _expected_labels(message),
        key=lambda label: (-max(map(len, label[2]), default=0), label[0] == "text"),
    )
    for reason, words, forms in ordered:
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
            call_id = next((own for own in ids if reason == "call" and own in trained), None)
            by_id = (
                "" if call_id is None else f": it names the call only by its id {_short(call_id)}"
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


def _find(trained: str, forms: tuple[str, ...], at: int, others: list[Span]) -> Span:
    """Return (place, size) of the first form that does not overlap the others, else (-1, 0)."""
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
    """Yield each part of a message that the model has to learn."""
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    for text in [content] if isinstance(content, str) else texts:
        if not isinstance(text, str):
            continue
        # The template may leave out reasoning before the answer, and white space around both.
        answer = text.rsplit("</think>", 1)[-1]
        for mark in ("<answer>", "</answer>"):
            answer = answer.replace(mark, "")
        if answer.strip():
            yield (
                "text",
                f"the text {_short(text)}",
                (text.strip(), answer.strip(), _escaped(answer.strip())),
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
    """Yield (a call, its function); an empty function for a malformed call."""
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        yield call, function if isinstance(function, dict) else {}


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


_RENDERER = ChatTemplateRenderer()
_ANSWER = "8Kd2vN6jF"


Expand = Callable[[str, list[Span]], tuple[str, list[Span]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    messages: list[Message]
    tools: JsonValue
    where: str


def conversation(record: Record, key: str) -> Conversation:
    """Read the messages under `key` of a record. Raises SW6110 and SW6111."""
    document, where, _ = record
    if key not in document:
        raise missing_field(where, key, document, "messages")
    entries = document[key]
    if not isinstance(entries, list) or not entries:
        raise refusal(
            "SW6111",
            f"{where}: the conversation has no messages",
            "Delete the record, or add messages.",
        )
    messages: list[Message] = []
    for number, message in enumerate(entries, 1):
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
    """Return (ids, label mask) of a conversation.

    expand: expands image placeholders, for a vision-language model.
    report: counts the conversation.
    Raises SW6112, SW6113, and SW6124 where something that the assistant said is not a label.
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
                f"{talk.where}: message {hidden.args[0] + 1} of the assistant cannot be located in "
                f"the output of {whose}"
            ),
            "Put {% generation %} marks around the assistant's text in the template "
            "(data.template), or set train_on: all.",
        ) from None
    except TemplateError as error:
        roles = ", ".join(str(m["role"])[:40] for m in talk.messages[:6])
        raise refusal(
            "SW6112",
            f"{talk.where}: {whose} refuses the conversation ({roles}): {error}",
            "Correct the record (without a system role, put its text into the first user message), "
            "or set another data.template.",
        ) from None
    except RenderLimitExceeded as error:
        raise refusal(
            "SW6112",
            f"{talk.where}: {whose} exceeded its limits: {error}",
            "Set another data.template, or remove the record.",
        ) from None
    try:
        if turns and not check_labels(talk.messages, text, spans) and report is not None:
            report.reasoning_not_rendered += 1
    except MissingLabel as lost:
        raise refusal(
            "SW6124",
            f"{talk.where}: {lost.args[0]}",
            "Set data.template to a template that writes this part, or remove the part from the "
            "record; `skip_damaged: 0.01` leaves out up to that share of the records, and "
            "`prepare` counts them.",
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
        # Every token with a character of the turn: "▁Yes" starts with the space before the answer.
        # GPT-2's offsets leave out leading spaces: a token of spaces only has no characters.
        empty = encoded.first == encoded.last
        trained |= (encoded.first < last) & (encoded.last > first)
        trained |= empty & (encoded.first > first) & (encoded.last <= last)
    return encoded.ids, trained


def end_of_turn_id(tokenizer: Tokenizer, template: str) -> int | None:
    """Return the id that ends an answer and is trained with it: <|im_end|>, <|eot_id|>, often
    eos_token.

    None where an answer does not end with a token of its own, or the template does not mark it as
    trained.
    """
    # One answer at the end (gpt-oss's <|return|>), then followed by a question (GLM's <|user|>).
    for follows, instructed, in_parts in itertools.product((False, True), repeat=3):
        turns = [("user", "hi"), ("assistant", _ANSWER)] + [("user", "hi")] * follows
        messages: list[Message] = []
        for role, said in [("system", "hi")] * instructed + turns:
            parts: JsonValue = [{"type": "text", "text": said}]
            messages.append({"role": role, "content": parts if in_parts else said})
        try:
            text, spans, _ = _RENDERER.render(
                template, messages, None, tokenizer.special(), turns=True
            )
        # A template may need a system message, or content in parts.
        except (TurnNotFound, TemplateError, RenderLimitExceeded):
            continue
        place = text.rfind(_ANSWER)
        tails = (text[place + len(_ANSWER) : last] for a, last in spans if a <= place < last)
        tail = next(tails, "")
        for token in reversed(tokenizer.encode([tail])[0].tolist() if tail else []):
            if tokenizer.is_special_token(token):
                return int(token)
    return None


class ConversationReader:
    """Read one source. Raises the errors of conversations, and with images SW6130 to SW6136.

    images: the processor and a writer of the same folder; None reads texts only.
    """

    def __init__(
        self,
        part: DataSection,
        tokenizer: Tokenizer,
        writer: DocumentWriter,
        report: RecordCounts,
        images: tuple[ImageProcessor, ImageWriter] | None = None,
    ) -> None:
        self.part, self.tokenizer, self.writer, self.report = part, tokenizer, writer, report
        self.images = images
        template = part.template or tokenizer.template
        if template is None:
            raise refusal(
                "SW6112",
                "the tokenizer has no chat template",
                "Set data.template, or use the tokenizer of the model's instruction-tuned version.",
            )
        self._template = template
        self._records = 0

    def read(self, files: tuple[str, ...], shown: ReadingProgress) -> Iterator[None]:
        """Yield after each record."""
        for name in files:
            for record in records(name, self.report):
                self._records += 1
                shown.add(record[2])
                try:
                    talk = conversation(record, self.part.messages)
                    if self.images is None:
                        self.writer.add(*self._encode(talk))
                    else:
                        self._add_with_images(talk, record[0].get("images"), name, *self.images)
                except Refusal as problem:
                    self.report.skip_record(problem)
                yield
        if self.images is not None:
            _, image_writer = self.images
            image_writer.check_damaged(self.part.skip_damaged, self._records, "conversations")

    def _encode(
        self, talk: Conversation, expand: Expand | None = None
    ) -> tuple[Ids, npt.NDArray[np.bool_]]:
        train_on = self.part.train_on
        return encode(talk, self.tokenizer, self._template, train_on, expand, self.report)

    def _add_with_images(
        self,
        talk: Conversation,
        images: object,
        file: str,
        image_processor: ImageProcessor,
        image_writer: ImageWriter,
    ) -> None:
        """Check the images' headers, expand their placeholders, and count what is left out."""
        section = self.part.images
        assert section is not None
        messages, sources = extract_images(images, talk.messages, talk.where)
        if len(sources) > section.per_row:
            image_writer.counts.too_many_images += 1
            return
        folder = Path(section.folder or Path(file).parent)
        try:
            inspected = [inspect_image(source, folder) for source in sources]
        except DamagedImage as why:
            image_writer.damaged(f"{talk.where}: {why}")
            if not self.part.skip_damaged:
                image_writer.check_damaged(0, self._records, "conversations")
            return

        def expand(text: str, spans: list[Span]) -> tuple[str, list[Span]]:
            token = image_processor.token
            if image_processor.has_adjacent_images(text):
                raise refusal(
                    "SW6136",
                    f"{talk.where}: two images follow each other without a token between them, "
                    "which this model type would take for one image",
                    "Let data.template write the tokens around each image, as the model's own "
                    "template does.",
                )
            written = image_processor.expand(text, spans, inspected)
            if written is None:
                raise refusal(
                    "SW6131",
                    f"{talk.where}: the chat template writes {token!r} {text.count(token)} times "
                    f"for {len(inspected)} images",
                    f"Correct data.template, which must write {token!r} once for each `image` "
                    "part, or remove that text from the record.",
                )
            return written

        ids, trained = self._encode(replace(talk, messages=messages), expand)
        number = self.writer.documents
        self.writer.add(ids, trained)
        if self.writer.documents > number:
            image_writer.add(number, inspected)

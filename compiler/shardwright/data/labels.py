"""Whether what the assistant said is in the text that a chat template made, as labels: nothing is lost in silence."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from shardwright.data.turns import Message, Span
from shardwright.diagnostics import Refusal, refusal
from shardwright.ir.json_value import JsonValue

REPORT_FILE = "labels.json"
_EXAMPLES = 3
REASONING = ("reasoning_content", "reasoning", "thinking")


class LostLabels(Exception):
    """args: what of the conversation is no label, in words; the reason that it is counted under."""


@dataclass(slots=True, kw_only=True)
class LabelReport:
    """records: conversations that were read. left_out: reason -> how many were, for what is no label of them; examples:
    the first ones. without_reasoning: those whose reasoning the template does not write."""

    records: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)
    without_reasoning: int = 0
    without_end: int = 0

    def leave_out(self, lost: LostLabels, where: str) -> None:
        words, reason = lost.args
        self.left_out[reason] = self.left_out.get(reason, 0) + 1
        if len(self.examples) < _EXAMPLES:
            self.examples.append(f"{where}: {words}")

    def check(self, share: float) -> None:
        """share: of the conversations that may be left out. Raises Refusal: SW6124."""
        if sum(self.left_out.values()) > share * self.records:
            raise self.refusal()

    def refusal(self) -> Refusal:
        return refusal(
            "SW6124",
            "; ".join(self.examples),
            "Give a template that writes it as data.template, or take it out of the record; `skip_damaged: 0.01` "
            "leaves out up to that share of the conversations, and `prepare` counts them.",
        )

    def write(self, folder: Path) -> None:
        (folder / REPORT_FILE).write_text(json.dumps(asdict(self)), encoding="utf-8")


def read_label_report(folder: Path) -> LabelReport:
    """folder: of prepared conversations. Empty for what an earlier version made."""
    try:
        document: Any = json.loads((folder / REPORT_FILE).read_text(encoding="utf-8"))
    except OSError:
        return LabelReport()
    return LabelReport(**document)


def check_labels(messages: list[Message], text: str, spans: Sequence[Span]) -> bool:
    """Whether all reasoning is there, too. Raises LostLabels where an answer or a call is not."""
    trained = "\n".join(text[first:last] for first, last in spans)
    at, all_reasoning = 0, True
    for number, message in enumerate(messages, 1):
        if message["role"] != "assistant":
            continue
        ends = [at]
        for reason, words, forms in _said(message):
            place, size = _find(trained, forms, at)
            if place < 0:
                raise LostLabels(f"message {number}: the chat template does not write {words} as a label", reason)
            ends.append(place + size)
        for key in REASONING:
            if isinstance(reasoning := message.get(key), str) and reasoning.strip():
                all_reasoning = all_reasoning and reasoning.strip() in trained
        at = max(ends)
    return all_reasoning


def _find(trained: str, forms: tuple[str, ...], at: int) -> tuple[int, int]:
    return next(((place, len(form)) for form in forms if (place := trained.find(form, at)) >= 0), (-1, 0))


def _said(message: Message) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """(reason, in words, how it may be written) of each thing that the model has to learn of a message."""
    for content in _texts(message.get("content")):
        # Reasoning in front of the answer may be left out, and the white space around both.
        answer = content.rsplit("</think>", 1)[-1]
        for mark in ("<answer>", "</answer>"):
            answer = answer.replace(mark, "")
        if answer.strip():
            yield "text", f"the text {_short(content)}", (content.strip(), answer.strip(), _escaped(answer.strip()))
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            yield "call", f"the call {_short(json.dumps(call, ensure_ascii=False))}", ()
            continue
        name, arguments = function.get("name"), function.get("arguments")
        yield "call", f"the call of {_short(str(name))}", (str(name),) if name else ()
        for value in _leaves(arguments):
            yield "arguments", f"the argument {_short(value)} of {_short(str(name))}", (value, _escaped(value))


def _texts(content: JsonValue) -> list[str]:
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, list) else []
    return [cast(str, p["text"]) for p in parts if isinstance(p, dict) and isinstance(p.get("text"), str)]


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

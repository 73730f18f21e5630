"""`template_process SECONDS`: renders chat templates, a JSON request a line on standard input, a
JSON answer a line on standard output. What one may take is set here, by the kernel: a loop inside
of C code hears of nothing else."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from shardwright.data.chat_format import (
    GENERATION_MARK,
    Message,
    Span,
    TemplateError,
    TurnFormat,
    TurnNotFound,
    detect_turn_format,
    find_turns,
)
from shardwright.data.chat_messages import MessageFormat, detect_message_format

SECONDS = 10
"""Of computing, for one conversation. Real templates take a millisecond."""
MEMORY_BYTES = 2 * 2**30
MOST_CHARACTERS = 64 * 2**20
"""Of the rendered text: as long as the longest record."""


def main(seconds: int) -> int:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="ascii")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints is no answer
    from transformers.utils.chat_template_utils import render_jinja_template

    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_DATA, MEMORY_BYTES)
    for line in sys.stdin.buffer:
        # From now on; the kernel counts whole seconds and ends the process (SIGXCPU) when they are
        # over.
        _limit(resource.RLIMIT_CPU, int(time.process_time()) + 1 + seconds)
        print(json.dumps(_answer(render_jinja_template, line)), file=answers, flush=True)
    return 0


def _limit(kind: int, most: int) -> None:
    """Sets a limit; a lower one where the shell's own limit (ulimit) is lower: only root may raise
    that."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _answer(jinja: Callable[..., Any], line: bytes) -> dict[str, Any]:
    """Returns {"text", "spans", "open"}, {"hidden"}: the number of a message, or {"error"}."""
    try:
        text, spans, is_open = _rendered(jinja, **json.loads(line))
    except TurnNotFound as hidden:
        return {"hidden": hidden.args[0]}
    except Exception as error:  # TemplateError, or what a conversation of gigabytes does here
        return {"error": str(error) or type(error).__name__}
    return {"text": text, "spans": spans, "open": is_open}


_FORMATS: dict[tuple[object, ...], tuple[MessageFormat, TurnFormat]] = {}
"""Remembers of each template what it takes, and what it writes around an answer."""
_MAX_FORMATS = 64


def _rendered(
    jinja: Callable[..., Any],
    *,
    template: str,
    messages: list[Message],
    tools: Any,
    special: dict[str, str],
    turns: bool = False,
    asks: bool = False,
) -> tuple[str, list[Span], bool]:
    """Returns (the text, where the assistant speaks, whether its last turn has no end).

    turns: with these places. asks: up to where the assistant is to speak, of messages in the
    template's own form.
    """

    def run(
        given: list[Message], *, prompt: bool, marks: bool = False, tools: Any = tools
    ) -> tuple[str, list[Span]]:
        try:
            texts, places = jinja(
                conversations=[given],
                tools=tools,
                chat_template=template,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=marks,
                **special,
            )
        except (
            Exception
        ) as error:  # whatever a template's code raises, memory and recursion among it
            raise TemplateError(_template_error_text(error)) from None
        if len(texts[0]) > MOST_CHARACTERS:
            raise TemplateError(f"it writes {len(texts[0]):,} characters")
        return str(texts[0]), places[0] if marks else []

    if asks:
        return *run(messages, prompt=True), False
    key = (template, *sorted(special.items()))
    if key not in _FORMATS:
        if len(_FORMATS) == _MAX_FORMATS:
            _FORMATS.clear()
        form = detect_message_format(
            lambda given, *, prompt: run(given, prompt=prompt, tools=None)[0]
        )
        shape = detect_turn_format(
            lambda given, *, prompt: run([form.of(m) for m in given], prompt=prompt, tools=None)[0]
        )
        _FORMATS[key] = form, shape
    form, shape = _FORMATS[key]
    messages = form.convert_conversation(messages)
    if not turns:
        return *run(messages, prompt=False), False
    if GENERATION_MARK.search(template):
        return *run(messages, prompt=False, marks=True), False
    found = find_turns(lambda given, *, prompt: run(given, prompt=prompt)[0], messages, shape)
    return *found, shape.end == "" and messages[-1]["role"] == "assistant"


def _template_error_text(error: Exception) -> str:
    from jinja2 import TemplateError as InTemplate

    said = " ".join(str(error).split())[:200]
    if not (isinstance(error, InTemplate) and said):
        said = f"{type(error).__name__}: {said}" if said else type(error).__name__
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == "<template>"
    ]
    line = getattr(error, "lineno", None) or (lines[-1] if lines else None)
    return f"line {line}: {said}" if line else said


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1])))

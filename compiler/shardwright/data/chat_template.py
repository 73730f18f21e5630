"""Render chat templates in a process of their own, with limits on CPU time and memory.

`python -m shardwright.data.chat_template SECONDS` reads a JSON request a line and writes a JSON
answer a line. The kernel enforces the limits: a loop in C code ignores everything else.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from shardwright.data.chat_format import (
    GENERATION_MARK,
    Message,
    MessageFormat,
    Span,
    TemplateError,
    TurnFormat,
    TurnNotFound,
    detect_message_format,
    detect_turn_format,
    find_turns,
)
from shardwright.utils.json_values import JsonValue

SECONDS = 10
"""CPU time for one conversation (s); real templates take a millisecond."""
MEMORY_BYTES = 2 * 2**30
MOST_CHARACTERS = 64 * 2**20
"""Longest rendered text: as long as the longest record."""


def main(seconds: int) -> int:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="ascii")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is not an answer
    from transformers.utils.chat_template_utils import render_jinja_template

    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_DATA, MEMORY_BYTES)
    for line in sys.stdin.buffer:
        # The kernel counts whole seconds from now and ends the process with SIGXCPU.
        _limit(resource.RLIMIT_CPU, int(time.process_time()) + 1 + seconds)
        print(json.dumps(answer_request(render_jinja_template, line)), file=answers, flush=True)
    return 0


def _limit(kind: int, most: int) -> None:
    """Set a resource limit, at most the shell's own (ulimit), which only root may raise."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def answer_request(jinja: Callable[..., Any], line: bytes) -> dict[str, Any]:
    """Return {"text", "spans", "open"}, {"hidden"}: the number of a message, or {"error"}."""
    try:
        text, spans, is_open = _rendered(jinja, **json.loads(line))
    except TurnNotFound as hidden:
        return {"hidden": hidden.args[0]}
    except Exception as error:  # TemplateError, or memory errors of a huge conversation
        return {"error": str(error) or type(error).__name__}
    return {"text": text, "spans": spans, "open": is_open}


_FORMATS: dict[tuple[object, ...], tuple[MessageFormat, TurnFormat]] = {}
"""Memoized message and turn formats of each template."""
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
    own_form: bool = False,
) -> tuple[str, list[Span], bool]:
    """Return (text, spans of the assistant, whether its last turn has no end).

    turns: whether to find the spans.
    asks: render a prompt for an answer.
    own_form: the messages are in the template's own form.
    """

    def run(
        conversation: list[Message], *, prompt: bool, marks: bool = False, tools: Any = tools
    ) -> tuple[str, list[Span]]:
        try:
            texts, places = jinja(
                conversations=[conversation],
                tools=tools,
                chat_template=template,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=marks,
                **special,
            )
        except Exception as error:  # memory and recursion errors included
            raise TemplateError(_template_error_text(error)) from None
        if len(texts[0]) > MOST_CHARACTERS:
            raise TemplateError(f"it writes {len(texts[0]):,} characters")
        return str(texts[0]), places[0] if marks else []

    if own_form:
        return *run(messages, prompt=asks), False
    key = (template, *sorted(special.items()))
    if key not in _FORMATS:
        if len(_FORMATS) == _MAX_FORMATS:
            _FORMATS.clear()
        form = detect_message_format(
            lambda talk, *, prompt: run(talk, prompt=prompt, tools=None)[0]
        )
        shape = detect_turn_format(
            lambda talk, *, prompt: run([form.of(m) for m in talk], prompt=prompt, tools=None)[0]
        )
        _FORMATS[key] = form, shape
    form, shape = _FORMATS[key]
    messages = form.convert_conversation(messages)
    if not turns:
        return *run(messages, prompt=asks), False
    if GENERATION_MARK.search(template):
        return *run(messages, prompt=False, marks=True), False
    rendered = find_turns(lambda talk, *, prompt: run(talk, prompt=prompt)[0], messages, shape)
    return *rendered, shape.end == "" and messages[-1]["role"] == "assistant"


def _template_error_text(error: Exception) -> str:
    from jinja2 import TemplateError as InTemplate

    message = " ".join(str(error).split())[:200]
    if not (isinstance(error, InTemplate) and message):
        message = f"{type(error).__name__}: {message}" if message else type(error).__name__
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == "<template>"
    ]
    line = getattr(error, "lineno", None) or (lines[-1] if lines else None)
    return f"line {line}: {message}" if line else message


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1])))

# The parent's side. Templates come with untrusted tokenizers: transformers' sandbox renders them in
# the limited process above.


class RenderLimitExceeded(Exception):
    """The template exceeded its limits, and its process ended."""


class ChatTemplateRenderer:
    """Keep one process for all conversations, and start a new one after an overrun."""

    def __init__(self, seconds: int = SECONDS) -> None:
        self.seconds = seconds
        self._process: subprocess.Popen[str] | None = None
        atexit.register(self.close)

    def render(
        self,
        template: str,
        messages: list[Message],
        tools: JsonValue,
        special: dict[str, str],
        *,
        turns: bool,
        asks: bool = False,
    ) -> tuple[str, list[Span], bool]:
        """Return the text and, with `turns`, the assistant's spans and whether its last turn has no
        end.

        special: tokens that a template may name. asks: the text is a prompt for an answer.
        Raises TemplateError, TurnNotFound, RenderLimitExceeded.
        """
        answer = self._ask(
            {
                "template": template,
                "messages": messages,
                "tools": tools,
                "special": special,
                "turns": turns,
                "asks": asks,
            }
        )
        if "error" in answer:
            raise TemplateError(answer["error"])
        if "hidden" in answer:
            raise TurnNotFound(int(answer["hidden"]))
        spans = [(int(first), int(last)) for first, last in answer["spans"]]
        return str(answer["text"]), spans, bool(answer["open"])

    def prompt(self, template: str, messages: list[Message], special: dict[str, str]) -> str:
        """Return the prompt for an answer. Raises TemplateError, RenderLimitExceeded."""
        answer = self._ask(
            {
                "template": template,
                "messages": messages,
                "tools": None,
                "special": special,
                "asks": True,
                "own_form": True,
            }
        )
        if "error" in answer:
            raise TemplateError(answer["error"])
        return str(answer["text"])

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._process is None:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "shardwright.data.chat_template",
                    str(self.seconds),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                encoding="ascii",
            )
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        answer = ""
        try:
            # Parquet has dates and bytes: like transformers, pass the name of their type.
            process.stdin.write(
                json.dumps(request, default=lambda value: f"<{type(value).__name__}>") + "\n"
            )
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            pass
        if not answer.endswith("\n"):
            code = process.wait()
            self.close()
            if code == -signal.SIGXCPU:
                raise RenderLimitExceeded(f"it used more than {self.seconds} s of CPU time")
            cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise RenderLimitExceeded(f"its process ended ({cause})")
        reply: dict[str, Any] = json.loads(answer)
        return reply

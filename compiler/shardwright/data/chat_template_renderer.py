"""Renders chat templates. They come with a stranger's tokenizer: transformers' sandbox renders
them, in a process of its own that cannot compute for long, nor take much memory
(template_process.py)."""

from __future__ import annotations

import atexit
import json
import signal
import subprocess
import sys
from typing import Any

from shardwright.data.chat_format import Message, Span, TemplateError, TurnNotFound
from shardwright.data.chat_template import SECONDS
from shardwright.utils.json_types import JsonValue


class RenderLimitExceeded(Exception):
    """Says that the template took more than it may, and its process ended."""


class ChatTemplateRenderer:
    """Keeps one process for any number of conversations, and starts a new one after an overrun."""

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
    ) -> tuple[str, list[Span], bool]:
        """Returns the text, and with `turns` where in it the assistant speaks, and whether its last
        turn has no end.

        special: tokens that a template may name. Raises TemplateError, TurnNotFound, Overrun.
        """
        answer = self._ask(
            {
                "template": template,
                "messages": messages,
                "tools": tools,
                "special": special,
                "turns": turns,
            }
        )
        if "error" in answer:
            raise TemplateError(answer["error"])
        if "hidden" in answer:
            raise TurnNotFound(int(answer["hidden"]))
        spans = [(int(first), int(last)) for first, last in answer["spans"]]
        return str(answer["text"]), spans, bool(answer["open"])

    def prompt(self, template: str, messages: list[Message], special: dict[str, str]) -> str:
        """Returns the text up to where the assistant is to speak. Raises TemplateError, Overrun."""
        answer = self._ask(
            {
                "template": template,
                "messages": messages,
                "tools": None,
                "special": special,
                "asks": True,
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
            # Parquet has dates and bytes: a template sees what transformers makes of them, the name
            # of their type.
            process.stdin.write(
                json.dumps(request, default=lambda value: f"<{type(value).__name__}>") + "\n"
            )
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            pass
        if not answer.endswith("\n"):
            process.wait()
            self.close()
            raise RenderLimitExceeded(self._cause(process.returncode))
        found: dict[str, Any] = json.loads(answer)
        return found

    def _cause(self, code: int) -> str:
        if code == -signal.SIGXCPU:
            return f"it computes for more than {self.seconds} s"
        return (
            "it ended its process "
            f"({signal.Signals(-code).name if code < 0 else f'exit code {code}'})"
        )

"""What a run leaves for its readers: run/attempt.json (in), run/metrics.jsonl, run/status.json, run/errors/ (out)."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

from shardwright.ir.json_value import JsonValue

PROGRESS = "@shardwright "
"""Marks rank 0's progress lines on the launcher's standard output."""


def write_json(path: Path, document: Mapping[str, JsonValue]) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(document) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def read_json(path: Path) -> dict[str, JsonValue]:
    """{} where there is none, or none that can be read."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


class Metrics:
    """run/metrics.jsonl: a line per optimizer step, cut back to where an attempt resumes."""

    def __init__(self, folder: Path, attempt: int, resumed_step: int) -> None:
        self.path, self.attempt = folder / "run" / "metrics.jsonl", attempt
        kept = []
        if resumed_step and self.path.exists():
            kept = [line for line in self.path.read_text().splitlines() if _step_of(line) <= resumed_step]
        temporary = self.path.with_suffix(".partial")
        temporary.write_text("".join(line + "\n" for line in kept))
        os.replace(temporary, self.path)
        self._file = self.path.open("a", buffering=1)

    def write(
        self, step: int, loss: float, grad_norm: float, learning_rate: float, tokens: int, seconds: float
    ) -> None:
        line = {
            "step": step,
            "loss": loss,
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            "tokens": tokens,
            "step_seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "attempt": self.attempt,
        }
        text = json.dumps(line)
        self._file.write(text + "\n")
        print(PROGRESS + text, flush=True)


def _step_of(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return 2**62  # a half-written last line


def write_status(folder: Path, status: str, attempt: int, **more: JsonValue) -> None:
    """status: running | done | preempted | failed."""
    write_json(folder / "run" / "status.json", {"status": status, "attempt": attempt, "time": time.time(), **more})

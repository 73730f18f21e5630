"""Islands and their store as processes beside a test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import warm
from tests.parity import harness

PATIENCE = 240.0


class Process:
    """A command of ours that runs beside the test, its output in a file."""

    def __init__(self, log: Path, *words: object) -> None:
        self.log = log
        with log.open("wb") as file:
            command = [sys.executable, "-m", "shardwright", *map(str, words)]
            self.process = subprocess.Popen(command, stdout=file, stderr=file, env=warm.environment())

    @property
    def said(self) -> str:
        return self.log.read_text()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()


def until(condition: Callable[[], Any], what: str, *processes: Process) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, (what, *(each.said for each in processes))
        time.sleep(0.02)


def pids(out: Path, island: int) -> list[int]:
    """Of its ranks, in their order."""
    ranks = sorted((out / f"island-{island}" / "run" / "ranks").glob("rank-*.json"))
    return [json.loads(path.read_text())["pid"] for path in ranks]


def to_ranks(out: Path, island: int, number: int) -> None:
    for pid in pids(out, island):
        os.kill(pid, number)


def step_of(out: Path, island: int) -> int:
    path = out / f"island-{island}" / "run" / "metrics.jsonl"
    return len(harness.metrics(out / f"island-{island}")) if path.exists() else 0


def listening(start: Callable[..., Process], out: Path) -> Process:
    store = start("outer-store", out)
    until(lambda: "listening" in store.said, "the store does not listen")
    return store

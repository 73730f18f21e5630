"""Islands and their store as processes beside a test."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from shardwright.utils.numeric_difference import largest_difference, state_dict_max_abs_diff
from tests import warm
from tests.launch.simulated_sites import Site
from tests.parity.harness import Case
from tests.parity.islands import ISLANDS, STEPS, island_losses, rounds, simulate, weights

PATIENCE = 120.0


class Process:
    """A command of ours that runs beside the test, its output in a file. site: where it runs."""

    def __init__(self, log: Path, *words: object, site: Site | None = None) -> None:
        self.log = log
        command = [sys.executable, "-m", "shardwright", *map(str, words)]
        if site is not None:
            command = site.command(*command)
        with log.open("wb") as file:
            environment = warm.environment(*(site.command() if site else ()))
            self.process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)

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


@contextlib.contextmanager
def processes(folder: Path) -> Iterator[Callable[..., Process]]:
    """Starts commands, whose outputs are files of the folder. They end with the block."""
    begun: list[Process] = []

    def start(*words: object, site: Site | None = None) -> Process:
        begun.append(Process(folder / f"log-{len(begun)}", *words, site=site))
        return begun[-1]

    try:
        yield start
    finally:
        for each in begun:
            each.end()


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
    return path.read_bytes().count(b"\n") if path.exists() else 0


def listening(start: Callable[..., Process], out: Path, *words: object, **where: Any) -> Process:
    store = start("outer-store", out, *words, **where)
    until(lambda: "listening" in store.said, "the store does not listen")
    return store


def comes(
    out: Path,
    store: Process,
    a: Process,
    start: Callable[..., Process],
    gone: Process | None,
    mend: Callable[[], None] = lambda: None,
    **where: Any,
) -> None:
    """Island 1, started while island 0 stands still, which would be done before it is there. gone:
    its former self. mend: called once that has ended."""
    with standing_still(out, 0):
        assert gone is None or gone.process.wait(PATIENCE) == 3
        mend()
        assert rounds(out)[-1]["step"] < STEPS, "it was too fast for this test"
        again = start("run", out, "--island", 1, **where)
        until(
            lambda: "island 1 is behind" in store.said, "island 1 does not come back", again, store
        )
    assert (a.process.wait(PATIENCE), again.process.wait(PATIENCE)) == (0, 0), a.said + again.said
    assert store.process.wait(60) == 0
    assert any(r["joined"] == [1] for r in rounds(out))


@contextlib.contextmanager
def standing_still(out: Path, island: int) -> Iterator[None]:
    to_ranks(out, island, signal.SIGSTOP)
    try:
        yield
    finally:
        to_ranks(out, island, signal.SIGCONT)


def replayed(case: Case, out: Path, tokens: Any, outer: dict[str, Any]) -> dict[str, Any]:
    """How far apart the islands' losses, all of them, and their weights are from a replay of the
    recorded memberships in one process. Asserts that both islands have the same weights, and that
    nothing is more than 1e-5 off."""
    members = [r["members"] for r in rounds(out)]
    wanted = simulate(case, tokens, outer, members)
    trained = [weights(out, island, out.parent / f"hf-{island}") for island in range(ISLANDS)]
    assert all(torch.equal(p, trained[1][name]) for name, p in trained[0].items())
    losses = [island_losses(out, island) for island in range(ISLANDS)]
    assert list(losses[0]) == list(range(1, STEPS + 1))
    loss = max(
        largest_difference(abs(loss - wanted.losses[k][step]) for step, loss in losses[k].items())
        for k in range(ISLANDS)
    )
    weight = state_dict_max_abs_diff(trained[0], wanted.weights)
    found = {"members": members, "loss": loss, "weight": weight}
    assert loss <= 1e-5 and weight <= 1e-5, found
    return found


class Watch:
    """Notes when an island's steps are done, from outside."""

    def __init__(self, out: Path, island: int) -> None:
        self._out, self._island, self._ended = out, island, threading.Event()
        self._times: list[float] = [time.monotonic()]
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        before = step_of(self._out, self._island)
        while not self._ended.wait(0.02):
            if step_of(self._out, self._island) != before:
                before = step_of(self._out, self._island)
                self._times.append(time.monotonic())

    def longest(self) -> float:
        """Seconds without a step, from the beginning of the watch until now, which is its end."""
        self._ended.set()
        self._thread.join()
        times = [*self._times, time.monotonic()]
        return max(b - a for a, b in itertools.pairwise(times))

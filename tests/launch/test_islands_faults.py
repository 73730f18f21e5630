"""Islands that are killed, whole or by one rank, between two outer steps or inside one, and others
that do not belong: the others go on at once, and nothing is trained otherwise."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwright.diloco.outer_store_channel import SECRET_FILE
from shardwright.utils.child_processes import free_port
from tests.launch.islands import (
    PATIENCE,
    Process,
    Watch,
    comes,
    listening,
    pids,
    processes,
    replayed,
    step_of,
    until,
)
from tests.launch.stalling_proxy import Turnpike
from tests.parity.harness import must, shardwright
from tests.parity.islands import ISLANDS, OUTER, one_island, rounds, write_inputs

pytestmark = [pytest.mark.launch, pytest.mark.prove]

CASE, DEADLINE, WORLD = one_island(), 20.0, 2
LONGEST_SECONDS = 5.0
"""Without a step, for islands that lose another one: a connection that ends is heard of at once.
The rest is a step, a checkpoint and what else this machine does."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    with processes(tmp_path) as starter:
        yield starter


@pytest.mark.parametrize("kind", ["nesterov", "overlap-2"])
@pytest.mark.parametrize("ranks", ["all", "rank 0"])
@pytest.mark.parametrize("when", ["in mid-round", "inside the sum"])
def test_an_island_that_is_killed_comes_back(
    tmp_path: Path,
    start: Callable[..., Process],
    when: str,
    ranks: str,
    kind: str,
    proved: Callable[[str, str, dict[str, Any]], None],
) -> None:
    """In the second round. Inside the sum: with one chunk and a half of each of its ranks at the
    store."""
    outer, port, inner = OUTER[kind], free_port(), free_port()
    launch = {"outer_store": f"127.0.0.1:{port}"}
    tokens = write_inputs(CASE, tmp_path, outer, deadline=DEADLINE, launch=launch)
    out = tmp_path / "out"
    store = listening(start, out, "--bind", f"127.0.0.1:{inner}")
    way = Turnpike(port, inner, island=1, ranks=WORLD, attempt=2, chunk=1)
    with contextlib.closing(way):
        a, b = (start("run", out, "--island", k) for k in range(ISLANDS))
        if when == "in mid-round":
            # An overlapped sum is still on its way in the fifth step.
            until(lambda: step_of(out, 1) >= 5 and rounds(out), "no second round", b)
        else:
            until(way.stopped.is_set, "no second round", store, a, b)
        watch, found = Watch(out, 0), pids(out, 1)
        for pid in found[: None if ranks == "all" else 1]:
            os.kill(pid, signal.SIGKILL)
        until(lambda: any(r["members"] == [0] for r in rounds(out)), "island 0 waits", store)
        waited = watch.longest()
        comes(
            out, store, a, start, b
        )  # at once, for few steps are left; island 0 goes on to the last of them
        assert not any(map(_lives, found)), "a rank of the island that lost one goes on"
    figures = {"longest_seconds": waited, **replayed(CASE, out, tokens, outer)}
    assert waited <= LONGEST_SECONDS, (figures, store.said)
    assert rounds(out)[0]["members"] == [0, 1] and rounds(out)[1]["members"] == [0]
    name = f"killed {when} {ranks} {kind}".replace(" ", "-")
    proved("islands", name, {**figures, "deadline_seconds": DEADLINE, "verdict": "proved"})


def test_an_island_that_does_not_belong_costs_nobody_anything(
    tmp_path: Path,
    start: Callable[..., Process],
    proved: Callable[[str, str, dict[str, Any]], None],
) -> None:
    """Another secret, and another layout: refused, while island 0 waits for the one that does
    belong."""
    outer = OUTER["average"]
    tokens = write_inputs(CASE, tmp_path, outer, deadline=120.0)
    out, other = tmp_path / "out", tmp_path / "other"
    must(
        shardwright(
            "compile", tmp_path / "recipe.yaml", "-o", other, "--set", "parallelism.zero_stage=3"
        )
    )
    store = listening(start, out)
    a = start("run", out, "--island", 0)
    until(lambda: "island 0 is connected" in store.said, "island 0 does not come", a, store)
    secret = out / SECRET_FILE
    strangers = {
        "SW6313": (out / "island-1", "0" * 64),
        "SW6316": (other / "island-1", secret.read_text()),
    }
    for code, (folder, own) in strangers.items():
        (folder / SECRET_FILE).parent.mkdir(parents=True, exist_ok=True)
        (folder / SECRET_FILE).write_text(own)
        refused = shardwright("run", folder)
        assert refused.returncode == 1 and code in refused.stderr, (code, refused)
        assert not list(folder.glob("checkpoints/step-*"))
    (out / "island-1" / SECRET_FILE).write_text(secret.read_text())
    b = start("run", out, "--island", 1)
    assert [each.process.wait(PATIENCE) for each in (a, b, store)] == [0, 0, 0], (
        a.said,
        b.said,
        store.said,
    )
    figures = replayed(CASE, out, tokens, outer)
    assert figures["members"] == [[0, 1]] * 3, store.said
    proved("islands", "strangers-refused", {**figures, "verdict": "proved"})


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True

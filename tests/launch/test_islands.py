"""Islands that die, come back and lose their store: the others go on, and nothing is trained
otherwise."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.utils.numeric_difference import state_dict_max_abs_diff
from tests.launch.islands import (
    PATIENCE,
    Process,
    comes,
    listening,
    pids,
    processes,
    replayed,
    step_of,
    until,
)
from tests.parity import harness
from tests.parity.harness import must, shardwright
from tests.parity.islands import (
    ISLANDS,
    OUTER,
    STEPS,
    one_island,
    rounds,
    simulate,
    weights,
    write_inputs,
)

pytestmark = pytest.mark.launch
CASE, DEADLINE = one_island(), 20.0


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    with processes(tmp_path) as starter:
        yield starter


@pytest.mark.prove
@pytest.mark.parametrize(
    ("ranks", "kind", "at"),
    [
        ("all", "nesterov", 5),
        ("all", "overlap-2", 5),  # its outer step is on its way, or here and not mixed in
        pytest.param("all", "overlap-2", 7, marks=pytest.mark.prove),
    ],
)
def test_an_island_killed_in_mid_round_comes_back(
    tmp_path: Path, start: Callable[..., Process], ranks: str, kind: str, at: int
) -> None:
    outer = OUTER[kind]
    tokens = write_inputs(CASE, tmp_path, outer, deadline=DEADLINE)
    out = tmp_path / "out"
    store = listening(start, out)
    a, b = (start("run", out, "--island", k) for k in range(ISLANDS))
    until(lambda: step_of(out, 1) >= at, f"no step {at}", b)
    for pid in pids(out, 1)[: None if ranks == "all" else 1]:
        os.kill(pid, signal.SIGKILL)
    until(lambda: any(r["members"] == [0] for r in rounds(out)), "island 0 waits", store)
    comes(out, store, a, start, b)
    replayed(CASE, out, tokens, outer)


@pytest.mark.prove
def test_a_late_newcomer(
    tmp_path: Path,
    start: Callable[..., Process],
    proved: Callable[[str, str, dict[str, Any]], None],
) -> None:
    outer = OUTER["nesterov"]
    tokens = write_inputs(CASE, tmp_path, outer, deadline=5.0)
    out = tmp_path / "out"
    store = listening(start, out)
    a = start("run", out, "--island", 0)
    until(lambda: rounds(out), "island 0 waits", store)
    comes(out, store, a, start, None)
    assert rounds(out)[0]["members"] == [0]
    proved("islands", "late-newcomer", {**replayed(CASE, out, tokens, outer), "verdict": "proved"})


@pytest.mark.prove
@pytest.mark.parametrize(
    ("kind", "made"),
    [
        ("nesterov", 1),
        ("overlap-2", 1),
        ("nesterov", 2),  # the last outer step is made by a run that has no step left to train
        pytest.param("overlap-2", 2, marks=pytest.mark.prove),
    ],
)
def test_without_the_store_islands_save_stop_and_go_on(
    tmp_path: Path, start: Callable[..., Process], kind: str, made: int
) -> None:
    outer = OUTER[kind]
    tokens = write_inputs(CASE, tmp_path, outer, deadline=5.0, save_every=STEPS)
    out = tmp_path / "out"
    store = listening(start, out)
    islands = [start("run", out, "--island", k) for k in range(ISLANDS)]
    until(lambda: len(rounds(out)) == made, "no outer step")
    store.process.kill()
    assert [each.process.wait(PATIENCE) for each in islands] == [3, 3]
    for k, each in enumerate(islands):
        assert "SW6315" in each.said
        status = json.loads(shardwright("status", out, "--json").stdout)["islands"][k]
        assert status["status"] == "failed" and "outer store was not reached" in status["cause"]
        assert harness.newest_checkpoint(out / f"island-{k}").name == f"step-{status['step']:08d}"
    listening(start, out)
    islands = [start("run", out, "--island", k) for k in range(ISLANDS)]
    assert [each.process.wait(PATIENCE) for each in islands] == [0, 0], islands[0].said
    assert [(r["step"], r["members"]) for r in rounds(out)] == [
        (4, [0, 1]),
        (8, [0, 1]),
        (12, [0, 1]),
    ]
    replayed(CASE, out, tokens, outer)


@pytest.mark.prove
@pytest.mark.parametrize("kind", ["nesterov", pytest.param("overlap-2", marks=pytest.mark.prove)])
def test_a_store_whose_disk_is_full_stops_and_no_island_trains_on_alone(
    tmp_path: Path, kind: str
) -> None:
    """At the second outer step. The record is whole, every island has a checkpoint, and what they
    train once there is space again is what they train where nothing went wrong."""
    outer = OUTER[kind]
    tokens = write_inputs(CASE, tmp_path, outer, deadline=5.0, save_every=STEPS)
    out = tmp_path / "out"
    command = [sys.executable, str(Path(__file__).with_name("store_on_a_small_disk.py")), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    full, again = json.loads(done.stdout.splitlines()[-1])
    assert (full["store"], full["islands"], full["statuses"]) == (1, [3, 3], ["failed"] * 2), full
    assert "SW6321" in full["said"][0] and "No space left on device" in full["said"][0]
    assert all("SW6315" in each for each in full["said"][1:])
    assert full["record"].endswith("\n") and full["record"].count('"step"') == 1
    assert (again["store"], again["islands"], again["statuses"]) == (0, [0, 0], ["done"] * 2), again
    (out / "run").mkdir(exist_ok=True)
    (out / "run" / "rounds.jsonl").write_text(again["record"])  # the disk went with the process
    assert [(r["step"], r["members"]) for r in rounds(out)] == [
        (4, [0, 1]),
        (8, [0, 1]),
        (12, [0, 1]),
    ]
    replayed(CASE, out, tokens, outer)


@pytest.mark.prove
def test_a_store_whose_output_nobody_reads_serves_its_islands(
    tmp_path: Path, start: Callable[..., Process]
) -> None:
    """`outer-store DIR | head -0`, and a terminal that went away."""
    outer = OUTER["average"]
    tokens = write_inputs(CASE, tmp_path, outer, deadline=DEADLINE)
    out = tmp_path / "out"
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "shardwright", "outer-store", str(out)]
    with subprocess.Popen(command, stdout=writes, stderr=writes) as store:
        os.close(writes)
        try:
            until(lambda: (out / "run" / "rounds.jsonl").exists(), "the store does not begin")
            islands = [start("run", out, "--island", k) for k in range(ISLANDS)]
            assert [each.process.wait(PATIENCE) for each in islands] == [0, 0], islands[0].said
            assert store.wait(60) == 0
        finally:
            store.kill()
    replayed(CASE, out, tokens, outer)


def test_what_a_user_gets_wrong(tmp_path: Path, start: Callable[..., Process]) -> None:
    write_inputs(CASE, tmp_path, OUTER["average"], deadline=1.0)
    out = tmp_path / "out"
    for words, code in (
        (["run", out], "SW6014"),
        (["run", out, "--island", 2], "SW6014"),
        (["run", out, "--island", "x"], "SW6014"),
        (["run", out / "island-0", "--island", 0], "SW6014"),
        (["outer-store", out / "island-0"], "SW6014"),
        (["outer-store", out, "--bind", "203.0.113.1:1"], "SW6318"),
        (["stop", out, "--island", 0], "SW6304"),
    ):
        told = shardwright(*words)
        assert told.returncode == 1 and code in told.stderr, (words, told)
    refused = shardwright("run", out, "--island", 0)
    assert refused.returncode == 1 and "SW6314" in refused.stderr, refused.stderr
    must(shardwright("status", out))


@pytest.mark.parametrize(
    ("kind", "at"), [("overlap-2", 4), pytest.param("nesterov", 5, marks=pytest.mark.prove)]
)
def test_islands_that_are_stopped_go_on(
    tmp_path: Path, start: Callable[..., Process], kind: str, at: int
) -> None:
    """Wherever each is: at an outer step that is on its way, one goes on without the other, and it
    comes back."""
    outer = OUTER[kind]
    tokens = write_inputs(CASE, tmp_path, outer, deadline=DEADLINE, save_every=STEPS)
    out = tmp_path / "out"
    store = listening(start, out)
    islands = [start("run", out, "--island", k) for k in range(ISLANDS)]
    until(lambda: step_of(out, 0) >= at, f"no step {at}", *islands)
    for k in range(ISLANDS):
        (out / f"island-{k}" / "run" / "stop").touch()
    assert [each.process.wait(PATIENCE) for each in islands] == [0, 0], islands[0].said
    states = [
        json.loads((out / f"island-{k}" / "run" / "status.json").read_text())
        for k in range(ISLANDS)
    ]
    assert {state["status"] for state in states} == {"preempted"}, states
    islands = [start("run", out, "--island", k) for k in range(ISLANDS)]
    assert [each.process.wait(PATIENCE) for each in islands] == [0, 0], (
        islands[0].said + islands[1].said
    )
    assert store.process.wait(60) == 0
    wanted = simulate(CASE, tokens, outer, [r["members"] for r in rounds(out)])
    trained = [weights(out, island, tmp_path / f"hf-{island}") for island in range(ISLANDS)]
    assert all(torch.equal(p, trained[1][name]) for name, p in trained[0].items())
    assert state_dict_max_abs_diff(trained[0], wanted.weights) <= 1e-5, (states, rounds(out))

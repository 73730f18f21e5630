"""A run whose ranks are killed at random moments and that is started again until it is done."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.checkpoint.checkpoint_manifest import damage
from tests.parity import harness
from tests.parity.harness import Case, metrics, must, recipe, shardwright

STEPS, EVERY, KEEP = 60, 5, 2
WATCH_SECONDS = 300.0

_ROWS = """
import hashlib, json, os
from pathlib import Path
from shardwright.parallel.micro_batches import TrainingBatches
_micro_batches = TrainingBatches.micro_batches
_log = open(Path(__file__).parent / f"rows-{os.environ['RANK']}.jsonl", "a", buffering=1)
def _logged(self, step, data_rank):
    found = _micro_batches(self, step, data_rank)
    rows = [hashlib.sha256(row.numpy().tobytes()).hexdigest() for m in found for row in m.input_ids]
    _log.write(json.dumps({"step": step, "data_rank": data_rank, "rows": rows}) + "\\n")
    return found
TrainingBatches.micro_batches = _logged
"""
"""Before the compiled folder's own script: which rows each rank really trains on, a line a step."""


def compiled(case: Case, folder: Path, name: str) -> Path:
    """STEPS different global batches, none of them twice."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = np.random.default_rng(3).integers(
        0, 257, (STEPS * case.batch, harness.LENGTH), dtype=np.int32
    )
    np.save(folder / "tokens.npy", tokens)
    document = recipe(case, folder)
    document["training"]["steps"] = STEPS
    document["checkpoint"] = {"every_steps": EVERY, "keep": KEEP}
    document["data"]["shuffle"] = True
    (folder / "recipe.yaml").write_text(json.dumps(document))
    out = folder / name
    must(shardwright("compile", folder / "recipe.yaml", "-o", out))
    script = (out / "train.py").read_text()
    (out / "train.py").write_text(_ROWS + script)
    return out


def uninterrupted(case: Case, folder: Path) -> Path:
    out = compiled(case, folder, "whole")
    must(shardwright("run", out))
    return out


def crashed(case: Case, folder: Path, kills: int, seed: int) -> tuple[Path, list[str]]:
    """Kills a random rank `kills` times, each in an attempt of its own, then lets the run finish.
    Returns the folder and when each kill was. Raises AssertionError where a checkpoint is not whole
    after a kill."""
    out = compiled(case, folder, f"crashed-{seed}")
    choice, moments = random.Random(seed), []
    for number in range(kills):
        left = kills - number
        moments.append(_attempt(out, choice, left, case.world))
        for step in (out / "checkpoints").glob("step-*"):
            why = damage(step, contents=True)
            assert why is None, f"{step.name} after {moments[-1]}: {why}"
    must(shardwright("run", out))
    return out, moments


def _attempt(out: Path, choice: random.Random, left: int, world: int) -> str:
    """One start, killed: in a save, between saves or while it comes up. Returns the moment in
    words."""
    begun = len(list(_lines(out)))
    process = subprocess.Popen(
        [sys.executable, "-m", "shardwright", "run", str(out)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    kind = choice.choices(("save", "step", "start"), (5, 4, 1))[0]
    ahead = choice.randint(1, max(1, (STEPS - begun) // left - EVERY))
    number = int(json.loads((out / "run" / "attempt.json").read_text())["attempt"]) if begun else 0
    _until(lambda: _attempt_of(out) > number and len(_ranks(out)) == world, process)
    if kind != "start":
        _until(lambda: _last(out) >= min(STEPS - EVERY, begun + ahead), process)
    if kind == "save":
        _until(lambda: any((out / "checkpoints").glob(".step-*.partial")), process)
        time.sleep(choice.random() * 0.1)
    else:
        time.sleep(choice.random() * 0.2)
    victim = choice.choice(_ranks(out))
    os.kill(victim, signal.SIGKILL)
    assert process.wait(timeout=WATCH_SECONDS) == 3
    return f"{kind}, at step {_last(out)}"


def _until(condition: Callable[[], bool], process: subprocess.Popen[Any]) -> None:
    end = time.monotonic() + WATCH_SECONDS
    while not condition():
        assert process.poll() is None, f"the run ended by itself with {process.returncode}"
        assert time.monotonic() < end
        time.sleep(0.002)


def _lines(out: Path) -> list[dict[str, Any]]:
    path = out / "run" / "metrics.jsonl"
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            break  # half written
    return found


def _last(out: Path) -> int:
    lines = _lines(out)
    return int(lines[-1]["step"]) if lines else 0


def _attempt_of(out: Path) -> int:
    try:
        return int(json.loads((out / "run" / "attempt.json").read_text())["attempt"])
    except (OSError, ValueError):
        return 0


def _ranks(out: Path) -> list[int]:
    """Processes of the ranks that have built their part."""
    found = []
    for path in (out / "run" / "ranks").glob("rank-*.json"):
        try:
            found.append(int(json.loads(path.read_text())["pid"]))
        except (OSError, ValueError):
            return []
    return found


def compare(whole: Path, out: Path) -> None:
    """The stitched curve is the uninterrupted one, and every sample was seen once. Raises
    AssertionError."""
    wanted, got = metrics(whole), metrics(out)
    keys = ("step", "loss", "grad_norm", "learning_rate")
    assert [[m[k] for k in keys] for m in got] == [[m[k] for k in keys] for m in wanted]
    rows, seen = _rows(whole), _rows(out)
    assert seen == rows
    every = [row for step in seen.values() for row in step]
    assert len(every) == len(set(every)) == STEPS * len(next(iter(seen.values())))
    assert sorted(p.name for p in (out / "checkpoints").glob("step-*")) == [
        "step-00000055",
        "step-00000060",
    ]


def _rows(out: Path) -> dict[int, list[str]]:
    """Step -> rows of the global batch, of the attempt that went past the step last."""
    found: dict[int, dict[int, list[str]]] = {}
    for path in out.glob("rows-*.jsonl"):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            found.setdefault(record["step"], {})[record["data_rank"]] = record["rows"]
    return {
        step: [row for _, rows in sorted(by_rank.items()) for row in rows]
        for step, by_rank in sorted(found.items())
    }

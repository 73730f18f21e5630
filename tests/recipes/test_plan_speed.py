"""`plan` of any model that comes with the package, on any GPU that does, takes 2 s of the processor at most: the whole
command, the interpreter's start included. Nothing of the model is on the machine beforehand."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwright.cluster.resolve import catalogue
from shardwright.model.popular.shipped import shipped_ids

NODES, LIMIT, ROUNDS = 64, 2.0, 3
GPUS = tuple(name for name in catalogue()["gpus"] if name != "cpu")


@pytest.mark.prove
@pytest.mark.parametrize("gpu", GPUS)
def test_any_model_is_planned_in_two_seconds(gpu: str, tmp_path: Path, proved: Callable[..., None]) -> None:
    slow, worst = [], ("", 0.0)
    for model in shipped_ids():
        seconds = min_of_rounds(model, gpu, tmp_path)
        worst = max(worst, (model, seconds), key=lambda each: each[1])
        slow += [(model, seconds)] * (seconds > LIMIT)
    assert not slow
    proved("plan-speed", gpu, {"models": len(shipped_ids()), "slowest": worst[0], "processor_seconds": worst[1]})


def min_of_rounds(model: str, gpu: str, folder: Path) -> float:
    """Again where it took too long: other work on the machine makes it slower."""
    found = LIMIT + 1
    for _ in range(ROUNDS):
        found = min(found, plan_seconds(model, gpu, folder))
        if found <= LIMIT:
            break
    return round(found, 2)


def plan_seconds(model: str, gpu: str, folder: Path) -> float:
    """1 is an answer, too: no layout of the model runs on so many of these GPUs."""
    words = ["plan", model, "--gpu", gpu, "--nodes", str(NODES)]
    environment = {
        **os.environ,
        "SHARDWRIGHT_CACHE": str(folder / "cache"),
        "HF_HUB_CACHE": str(folder),
        "HF_TOKEN": "",
    }
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "shardwright", *words], cwd=folder, env=environment, capture_output=True, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr, (model, gpu, done.stderr[-2000:])
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime

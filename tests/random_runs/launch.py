"""Many random runs in few launches of worker.py, and what came of each: `python -m
tests.random_runs.launch SEED...`"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shardwright.monitor.rank_events import is_secondary_failure
from tests.random_runs.draw import Case, draw
from tests.worker_launch import launch_worker

ROOT = Path(__file__).resolve().parents[2]
RUNS_A_LAUNCH = 25
EXACT = {"loss": 1e-5, "norm": 1e-4, "weights": 2e-5, "held_out": 1e-5, "rate": 1e-12}
"""What an fp32 run may differ by: absolute, the gradient norm relative. The same behind a
resume."""
HALF = {"loss": 0.05, "norm": 0.05, "held_out": 0.05, "rate": 1e-12}
"""What a bf16 run may differ by from a plain bf16 loop: losses of 5 to 7 within one percent, norms
relative."""


def run(seeds: Iterable[int], out: Path) -> dict[int, dict[str, Any]]:
    """Seed -> its outcome: equal | wrong | refused | error, and its figures."""
    cases = {seed: draw(seed) for seed in seeds}
    groups: dict[tuple[str, int], list[int]] = {}
    for seed, case in cases.items():
        groups.setdefault(
            ("megatron" if case.engine == "megatron" else "deepspeed", case.world), []
        ).append(seed)
    found: dict[int, dict[str, Any]] = {}
    for (engine, world), members in sorted(groups.items()):
        found |= _launched(members, world, out / f"{engine}-{world}")
    return {
        seed: {"words": cases[seed].words(), **_judged(cases[seed], line)}
        for seed, line in found.items()
    }


def _launched(seeds: list[int], world: int, out: Path) -> dict[int, dict[str, Any]]:
    out.mkdir(parents=True, exist_ok=True)
    found: dict[int, dict[str, Any]] = {}
    left = list(seeds)
    while left:
        done = launch_worker(
            Path(__file__).with_name("worker.py"),
            world,
            seconds=3000,
            OMP_NUM_THREADS="1",
            SHARDWRIGHT_RANDOM_OUT=str(out),
            SHARDWRIGHT_RANDOM_SEEDS=",".join(map(str, left[:RUNS_A_LAUNCH])),
            SHARDWRIGHT_CACHE="off",
        )
        read = _read(out, world)
        if not set(read) & set(left):
            read[left[0]] = {"outcome": "error", "error": done.stdout[-2000:] + done.stderr[-3000:]}
        found |= read
        left = [seed for seed in left if seed not in found]
    return found


def _read(out: Path, world: int) -> dict[int, dict[str, Any]]:
    """Seeds that every rank has reported, or one an error of; what a rank says because another
    failed is no cause."""
    reported: dict[int, list[dict[str, Any]]] = {}
    for file in sorted(out.glob("rank-*.jsonl")):
        for line in map(json.loads, file.read_text().splitlines()):
            reported.setdefault(line.pop("seed"), []).append(line)
    found = {}
    for seed, lines in reported.items():
        errors = [line for line in lines if line["outcome"] == "error"]
        causes = [line for line in errors if not is_secondary_failure(line["error"])]
        if errors or len(lines) == world:
            found[seed] = (causes or errors or lines)[0]
    return found


def _judged(case: Case, line: dict[str, Any]) -> dict[str, Any]:
    if line["outcome"] != "ran":
        return line
    limits = HALF if case.recipe["training"]["precision"] == "bf16" else EXACT
    wrong = [
        name
        for name, value in line.items()
        if (limit := limits.get(name.removesuffix("_resumed"))) is not None
        and not (math.isfinite(value) and value <= limit)
    ]
    return {**line, "outcome": "wrong", "wrong": wrong} if wrong else {**line, "outcome": "equal"}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for seed, line in sorted(
            run(map(int, sys.argv[1:]), Path(os.environ.get("OUT", folder))).items()
        ):
            print(json.dumps({"seed": seed, **line}), flush=True)

"""The simulated interleaved schedule against Megatron-Core's own, with chunks that sleep."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwright.layout.interleaved_schedule import simulate
from shardwright.utils.numeric_difference import largest_difference

ROOT = Path(__file__).resolve().parents[2]
BOUND = 0.03
MOST_PER_PASS_SECONDS = 0.006
"""What a pass may cost beyond its sleep: launch, autograd, gloo. One constant for all cases."""


def case(name: str, ranks: int, micro_batches: int, forward: list[float]) -> dict[str, Any]:
    """Parts of the model, of all ranks; a backward pass takes twice as long."""
    keys = {
        "name": name,
        "ranks": ranks,
        "micro_batches": micro_batches,
        "forward_seconds": forward,
    }
    return {**keys, "backward_seconds": [2 * seconds for seconds in forward]}


def bumpy(parts: int, largest: float) -> list[float]:
    return [
        largest * (0.5 + 0.5 * ((7 * part) % parts) / max(1, parts - 1)) for part in range(parts)
    ]


CASES = [
    *(
        case(f"even-{p}-{v}-{m}", p, m, [0.06] * (p * v))
        for p, v, m in ((2, 2, 4), (2, 3, 4), (4, 2, 4), (4, 2, 8))
    ),
    *(
        case(f"head-{p}-{v}-{m}", p, m, [0.05] * (p * v - 1) + [0.1])
        for p, v, m in ((2, 2, 8), (4, 2, 8), (4, 3, 4))
    ),
    *(
        case(f"first-{p}-{v}-{m}", p, m, [0.1] + [0.05] * (p * v - 1))
        for p, v, m in ((2, 2, 4), (4, 2, 4), (2, 4, 4))
    ),
    *(
        case(f"bumpy-{p}-{v}-{m}", p, m, bumpy(p * v, 0.1))
        for p, v, m in ((2, 2, 6), (2, 3, 8), (4, 2, 8), (4, 3, 4))
    ),
    *(case(f"long-{p}-{v}-{m}", p, m, [0.04] * (p * v)) for p, v, m in ((2, 2, 16), (4, 2, 16))),
]


def errors(seconds: list[float], per_pass: float) -> list[float]:
    simulated = [
        simulate(c["ranks"], c["micro_batches"], *_with(c, per_pass), send_seconds=0.0).seconds
        for c in CASES
    ]
    return [wanted / found - 1 for wanted, found in zip(simulated, seconds, strict=True)]


def _with(c: dict[str, Any], per_pass: float) -> tuple[list[float], list[float]]:
    return [x + per_pass for x in c["forward_seconds"]], [
        x + per_pass for x in c["backward_seconds"]
    ]


@pytest.mark.prove
@pytest.mark.skipif(
    not importlib.util.find_spec("megatron"), reason="megatron-core is not installed"
)
def test_megatron_takes_as_long_as_simulated(tmp_path: Path, proved: Callable[..., None]) -> None:
    measured: dict[str, float] = {}
    for ranks in sorted({c["ranks"] for c in CASES}):
        own = [c for c in CASES if c["ranks"] == ranks]
        file, out = tmp_path / f"cases-{ranks}.json", tmp_path / f"seconds-{ranks}.json"
        file.write_text(json.dumps(own))
        words = [
            sys.executable,
            "-m",
            "tests.schedule.megatron_sleepers",
            str(ranks),
            str(file),
            str(out),
        ]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        measured |= dict(zip((c["name"] for c in own), json.loads(out.read_text()), strict=True))
    seconds = [measured[c["name"]] for c in CASES]
    grid = [MOST_PER_PASS_SECONDS * step / 60 for step in range(61)]
    per_pass = min(grid, key=lambda x: largest_difference(map(abs, errors(seconds, x))))
    found = errors(seconds, per_pass)
    for c, real, error in zip(CASES, seconds, found, strict=True):
        proved(
            "megatron-schedule",
            c["name"],
            {"seconds": real, "error": error, "per_pass_seconds": per_pass},
        )
    assert len(CASES) == 16
    assert largest_difference(map(abs, found)) <= BOUND, dict(
        zip((c["name"] for c in CASES), found, strict=True)
    )

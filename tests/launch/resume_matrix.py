"""Every layout resumed on every other: many engines in few launches of matrix_worker.py, by world
size."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from shardwright.utils.numeric_difference import max_series_diff
from tests.parity.harness import Case
from tests.worker_launch import launch_worker

ROOT = Path(__file__).resolve().parents[2]
BATCH, SAVED, LAST = 8, 4, 9
"""A checkpoint after step SAVED, then five more steps."""

_LAYOUTS: dict[str, dict[str, int]] = {
    "1x1x1": {},
    "pp2": {"pipeline": 2},
    "tp2": {"tensor": 2},
    "dp2": {"data": 2},
    "pp2-tp2": {"pipeline": 2, "tensor": 2},
    "pp2-dp2": {"pipeline": 2, "data": 2},
    "tp2-dp2": {"tensor": 2, "data": 2},
    "zero3-dp2": {"data": 2, "zero_stage": 3},
}
CONTEXT: dict[str, dict[str, int]] = {
    "s2": {"context": 2},
    "s2-zero3": {"context": 2, "zero_stage": 3},
}
"""Of context ranks: not in the matrix, and named in it."""
EXPERT: dict[str, dict[str, int]] = {
    "e2": {"data": 2, "expert": 2},
    "e2-zero3": {"data": 2, "expert": 2, "zero_stage": 3},
    "s2-e2": {"context": 2, "expert": 2},
    "e2-tp2": {"data": 2, "expert": 2, "tensor": 2},
    "e2-pp2": {"data": 2, "expert": 2, "pipeline": 2},
}
"""Of expert ranks, the same."""
WIDE: dict[str, dict[str, int]] = {
    f"pp{p}-tp{t}-e{e}-s{s}": {
        "pipeline": p,
        "tensor": t,
        "context": s,
        "expert": e,
        "data": 2 if e > s else 1,  # expert ranks out of context ranks, where there are some
    }
    for p, t, e, s in itertools.product((1, 2), repeat=4)
}
"""Every combination that 8 ranks hold."""
MODELS = ("llama", "gpt2")


def case(name: str) -> Case:
    """name: "llama pp2-tp2". The same global batch in every layout."""
    model, layout = name.split()
    keys = {**_LAYOUTS, **CONTEXT, **EXPERT, **WIDE}[layout]
    return Case(model=model, micro=2, accumulation=BATCH // 2 // keys.get("data", 1), **keys)  # type: ignore[arg-type]


def all_pairs() -> list[tuple[str, str]]:
    return [(f"{m} {a}", f"{m} {b}") for m in MODELS for a in _LAYOUTS for b in _LAYOUTS if a != b]


def wide_pairs() -> list[tuple[str, str]]:
    """Each on three others, near and far."""
    names = [f"mixtral {layout}" for layout in WIDE]
    return [(a, names[(at + far) % len(names)]) for at, a in enumerate(names) for far in (1, 5, 10)]


def resumed(pairs: list[tuple[str, str]], out: Path) -> dict[tuple[str, str], float]:
    """(from, to) -> the largest difference of the five losses after the change from those of the
    run that was not interrupted."""
    names = sorted({name for pair in pairs for name in pair})
    worlds = sorted({case(name).world for name in names})
    for world in worlds:
        _launch(world, {"save": [n for n in names if case(n).world == world], "load": []}, out)
    for world in worlds:
        _launch(
            world,
            {"save": [], "load": [pair for pair in pairs if case(pair[1]).world == world]},
            out,
        )
    return differences(json.loads((out / "losses.json").read_text()), pairs)


def differences(
    losses: dict[str, list[float]], pairs: list[tuple[str, str]]
) -> dict[tuple[str, str], float]:
    return {(a, b): max_series_diff(losses[f"{a} -> {b}"], losses[a]) for a, b in pairs}


def _launch(world: int, work: dict[str, Any], out: Path) -> None:
    (out / "work.json").write_text(json.dumps(work))
    result = launch_worker(
        Path(__file__).with_name("matrix_worker.py"),
        world,
        seconds=1800,
        SHARDWRIGHT_MATRIX_OUT=str(out),
    )
    done = out / f"done-{world}"
    assert done.exists(), result.stdout[-6000:] + result.stderr[-6000:]
    done.unlink()

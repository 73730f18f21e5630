"""Many model types in few launches of pipeline_worker.py, and what came of each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardwright.monitor.rank_events import is_secondary_failure
from tests.figures import worst_of_ranks
from tests.worker_launch import launch_worker

LOSS_ABSOLUTE, NORM_RELATIVE, WEIGHT_ABSOLUTE = 1e-5, 1e-4, 2e-5
GRADIENT_ABSOLUTE = 2e-5
"""What a layout of the zoo may differ by from the plain process; an element of the first step's
gradient, whose norm is clipped to 0.5, where experts or rows are shared out."""

OFF = ("loss", "norm", "weights", "gradient")
TYPES_A_LAUNCH = 64


def run_types(
    types: list[str],
    layout: str,
    ranks: int,
    out: Path,
    kind: str = "",
    worker: str = "pipeline_worker.py",
) -> dict[str, dict[str, Any]]:
    """Type -> its worst figures over the ranks, its refusal, or its error.

    A rank that fails ends its launch, since others may wait for it in a collective; the next launch
    goes on behind it.
    """
    out.mkdir(parents=True)
    found: dict[str, dict[str, Any]] = {}
    died: dict[str, dict[str, Any]] = {}
    left = list(types)
    while left:
        result = launch_worker(
            Path(__file__).with_name(worker),
            ranks,
            seconds=1800,
            SHARDWRIGHT_ZOO_OUT=str(out),
            SHARDWRIGHT_ZOO_TYPES=",".join(left[:TYPES_A_LAUNCH]),
            SHARDWRIGHT_ZOO_LAYOUT=layout,
            SHARDWRIGHT_ZOO_KIND=kind,
            SHARDWRIGHT_CACHE="off",
        )
        found = {**read(out, ranks), **died}
        rest = [t for t in left if t not in found]
        if len(rest) == len(left):
            found[left[0]] = died[left[0]] = {
                "error": result.stdout[-2000:] + result.stderr[-2000:]
            }
            rest = left[1:]
        left = rest
    return found


def read(out: Path, ranks: int) -> dict[str, dict[str, Any]]:
    """Types that every rank has reported, or one an error of."""
    reported: dict[str, dict[Path, dict[str, Any]]] = {}
    for file in sorted(out.glob("rank-*.jsonl")):
        for line in file.read_text().splitlines():
            figures = json.loads(line)
            if is_secondary_failure(figures.get("error", "")):
                # the other rank failed, maybe at the type before: this one gets a launch of its own
                continue
            reported.setdefault(figures.pop("type"), {})[file] = figures
    found = {}
    for model_type, by_rank in reported.items():
        errors = [figures for figures in by_rank.values() if "error" in figures]
        if errors or len(by_rank) == ranks:
            found[model_type] = errors[0] if errors else _merged(list(by_rank.values()))
    return found


def _merged(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    first = ranks[0]
    if any("refused" in figures for figures in ranks):
        alike = all(figures == first for figures in ranks)
        return first if alike else {"error": f"not every rank refuses it: {ranks}"}
    off = worst_of_ranks(
        [{key: figures[key] for key in OFF if key in figures} for figures in ranks], len(ranks)
    )
    return {**first, **off, "sharded": min(figures["sharded"] for figures in ranks)}


def verdict(figures: dict[str, Any]) -> str:
    """proved | refused | wrong | error"""
    if "error" in figures:
        return "error"
    if "refused" in figures:
        return "refused"
    good = (
        figures["loss"] <= LOSS_ABSOLUTE
        and figures["norm"] <= NORM_RELATIVE
        and figures["weights"] <= WEIGHT_ABSOLUTE
    )
    good = good and figures.get("gradient", 0.0) <= GRADIENT_ABSOLUTE
    return "proved" if good else "wrong"

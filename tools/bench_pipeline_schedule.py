"""`make bench-schedule`: simulated steps, and our partitions, on DeepSpeed's own pipeline engines
with sleeping stages.

Prints what it finds and writes benchmarks/schedule.json.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from shardwright.utils.numeric_difference import largest_difference
from tests.schedule.engine import (
    MODELS,
    ROOT,
    Case,
    case,
    errors,
    fitted_per_call_seconds,
    layout_of,
    measured,
    median,
    partition_case,
    partitions,
    simulated,
)
from tools.prove.proof_results import stamp

FILE = ROOT / "benchmarks" / "schedule.json"
REPEATS = 3
PARTITION_REPEATS = 5
STAGES, MICRO_BATCHES = 8, 8
CONTROL = "ours again"


def step_cases() -> list[Case]:
    """Even stages, a heavy one at either end, stages that all differ; both schedules."""
    cases = []
    for ranks in (4, 8):
        shapes = {
            "even": [0.05] * ranks,
            "heavy last": [0.04] * (ranks - 1) + [0.08],
            "heavy first": [0.08] + [0.04] * (ranks - 1),
            "all differ": [0.035 + 0.03 * ((3 * s) % ranks) / ranks for s in range(ranks)],
        }
        for shape, forward in shapes.items():
            cases += [case(f"1f1b pp{ranks} m{m} {shape}", "1f1b", m, forward) for m in (4, 8, 16)]
            both = [*forward, *reversed(forward)]
            cases.append(
                case(f"dualpipev pp{ranks} m{2 * ranks} {shape}", "dualpipev", 2 * ranks, both)
            )
    return cases


def steps(folder: Path) -> dict[str, Any]:
    """The least of the repeats counts: other work on the machine only lengthens a step. The median
    stands beside it."""
    cases = step_cases()
    repeats = measured(cases, folder, REPEATS, 1800)
    seconds = [min(s) for s in repeats]
    per_call = fitted_per_call_seconds(cases, seconds)
    found = errors(cases, seconds, per_call)
    rows = {}
    for c, all_of_it, s, error in zip(cases, repeats, seconds, found, strict=True):
        rows[c.name] = {
            "measured_seconds": s,
            "median_seconds": median(all_of_it),
            "simulated_seconds": simulated(c, per_call),
            "error": error,
        }
        print(
            f"{c.name:36s} {s:7.3f} s  simulated {simulated(c, per_call):7.3f} s  {error:+6.1%}",
            flush=True,
        )
    largest = largest_difference(map(abs, found))
    print(f"per call {per_call * 1e3:.2f} ms, largest error {largest:.1%}", flush=True)
    return {"per_call_seconds": per_call, "largest_error": largest, "cases": rows}


def models(folder: Path) -> dict[str, Any]:
    """Each method against ours: how much longer its step is. The control is ours once more: the
    noise."""
    cases = []
    cuts: dict[str, dict[str, tuple[int, ...]]] = {}
    for model in MODELS:
        layout = layout_of(model, STAGES, MICRO_BATCHES)
        cuts[model] = partitions(layout)
        for method, cut in [*cuts[model].items(), (CONTROL, cuts[model]["ours"])]:
            cases.append(partition_case(f"{model} {method}", layout, cut, 0.15))
    seconds = dict(
        zip((c.name for c in cases), measured(cases, folder, PARTITION_REPEATS, 1800), strict=True)
    )
    predicted = {c.name: simulated(c, 0.0) for c in cases}
    rows: dict[str, Any] = {}
    for model in MODELS:
        ours = median(seconds[f"{model} ours"])
        rows[model] = {}
        for method in (*cuts[model], CONTROL):
            name = f"{model} {method}"
            rows[model][method] = {
                "boundaries": list(cuts[model].get(method, cuts[model]["ours"])),
                "measured_seconds": median(seconds[name]),
                "slower": median(seconds[name]) / ours - 1,
                "slower_simulated": predicted[name] / predicted[f"{model} ours"] - 1,
            }
            row = rows[model][method]
            print(
                f"{name:44s} {row['measured_seconds']:7.3f} s  {row['slower']:+6.1%}  "
                f"simulated {row['slower_simulated']:+6.1%}",
                flush=True,
            )
    noise = largest_difference(abs(rows[model][CONTROL]["slower"]) for model in MODELS)
    print(f"noise {noise:.1%}", flush=True)
    return {"stages": STAGES, "micro_batches": MICRO_BATCHES, "noise": noise, "models": rows}


def main() -> dict[str, Any]:
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        result = {
            **stamp(),
            "command": "make bench-schedule",
            "load_at_start": load,
            "steps": steps(Path(folder)),
            "partitions": models(Path(folder)),
        }
    FILE.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


if __name__ == "__main__":
    main()

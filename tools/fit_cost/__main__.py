"""`make fit-cost`: fits the constants to the published rows and writes
compiler/shardwright/cost/constants.json, and engines/assumed_runs.json.

From the priors, so that the same rows give the same file.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path

import numpy as np

import shardwright.cost
import shardwright.engines
from shardwright.cost.cost_constants import Constants, constant_entries, default_constants
from tools.fit_cost.assumed_runs import ASSUMED_RUNS
from tools.fit_cost.least_squares_fit import fit, fitted_names, memory_target, priors, time_target
from tools.fit_cost.published_runs import (
    Case,
    estimate,
    load_cases,
    load_engine_cases,
    load_moe_cases,
    load_own_cases,
)

FILE = Path(shardwright.cost.__file__).with_name("constants.json")
ASSUMED = Path(shardwright.engines.__file__).with_name("assumed_runs.json")
DIGITS = 4
# memory_headroom: auto keeps free what the prediction falls short by in nineteen rows of twenty.
HEADROOM_PERCENTILE = 95


def headroom(cases: list[Case], c: Constants) -> float:
    short = [
        target / estimate(case, c).memory.peak_bytes - 1
        for case in cases
        if (target := memory_target(case)) is not None
    ]
    return round(max(0.0, float(np.percentile(short, HEADROOM_PERCENTILE))), 2)


def document(cases: list[Case], c: Constants) -> dict[str, object]:
    values = dataclasses.asdict(c)
    fitted = {*fitted_names(memory=False), *fitted_names(memory=True)}
    constants = {
        name: {
            **entry,
            "value": float(f"{values[name]:.{DIGITS}g}") if name in fitted else values[name],
        }
        for name, entry in constant_entries().items()
    }
    timed = [case for case in cases if time_target(case) is not None]
    weighed = [case for case in cases if memory_target(case) is not None]
    return {
        "written_by": "make fit-cost",
        "time_rows": dict(Counter(case.project for case in timed)),
        "memory_rows": dict(Counter(case.project for case in weighed)),
        "constants": constants,
    }


def write_assumed_runs() -> None:
    ASSUMED.write_text(json.dumps({"written_by": "make fit-cost", **ASSUMED_RUNS}, indent=1) + "\n")


def main() -> None:
    write_assumed_runs()
    cases = load_cases() + load_engine_cases() + load_moe_cases() + load_own_cases()
    c = fit(cases, priors())
    c = dataclasses.replace(c, memory_headroom=headroom(cases, c))
    before = default_constants()
    FILE.write_text(json.dumps(document(cases, c), indent=1) + "\n")
    for name in (*fitted_names(memory=False), *fitted_names(memory=True), "memory_headroom"):
        entry = constant_entries()[name]
        print(
            f"{name:30s} {entry['prior']:10.4g} prior  {getattr(before, name):10.4g} -> "
            f"{getattr(c, name):10.4g}"
        )


if __name__ == "__main__":
    main()

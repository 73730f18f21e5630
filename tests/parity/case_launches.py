"""Many parity cases in one launch of cases_worker.py."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from tests.figures import worst_of_ranks
from tests.worker_launch import launch_worker

Case = TypeVar("Case")
Proved = Callable[[str, str, dict[str, Any]], None]
"""Is the fixture that keeps the figures of a case for benchmarks/AREA.json."""


def sample_of(cases: Mapping[str, Case], *names: str) -> dict[str, Case]:
    """Return the cases that run without `make prove`, which runs all of them."""
    return {name: cases[name] for name in names}


def start(worker: str, cases: Mapping[str, Any], out: Path) -> str:
    """A worker of this folder under the real launcher, once; its output. All cases of one world
    size."""
    out.mkdir(parents=True, exist_ok=True)
    (ranks,) = {case.world for case in cases.values()}
    result = launch_worker(
        Path(__file__).with_name(worker),
        ranks,
        seconds=1800,
        SHARDWRIGHT_CASES_OUT=str(out),
        SHARDWRIGHT_CASES=json.dumps(
            {name: dataclasses.asdict(case) for name, case in cases.items()}
        ),
    )
    return result.stdout[-3000:] + result.stderr[-3000:]


def launched(
    cases: Mapping[str, Any], out: Path, worker: str = "cases_worker.py"
) -> dict[str, dict[str, Any]]:
    """Case -> its worst figures over the ranks. All of one world size."""
    printed = start(worker, cases, out)
    return read(cases, out, printed)


def read(cases: Mapping[str, Any], out: Path, printed: str = "") -> dict[str, dict[str, Any]]:
    """What the ranks wrote."""
    found: dict[str, list[dict[str, Any]]] = {}
    for file in sorted(out.glob("rank-*.jsonl")):
        for line in map(json.loads, file.read_text().splitlines()):
            name = line.pop("case")
            assert "error" not in line, f"{name}: {line['error']}"
            found.setdefault(name, []).append(line)
    assert set(found) == set(cases), printed
    return {name: worst_of_ranks(ranks, cases[name].world) for name, ranks in found.items()}

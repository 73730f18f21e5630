"""Many parity cases in one launch of cases_worker.py."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwright.utils.child_processes import free_port
from tests.figures import worst_of_ranks


def start(worker: str, cases: Mapping[str, Any], out: Path) -> str:
    """A worker of this folder under the real launcher, once; its output. All cases of one world
    size."""
    environment = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": os.pathsep.join(
            [
                str(Path(__file__).resolve().parents[2]),
                *filter(None, [os.environ.get("PYTHONPATH")]),
            ]
        ),
        "SHARDWRIGHT_CASES_OUT": str(out),
        "SHARDWRIGHT_CASES": json.dumps(
            {name: dataclasses.asdict(case) for name, case in cases.items()}
        ),
    }
    out.mkdir(parents=True, exist_ok=True)
    program, script = Path(sys.executable).parent / "deepspeed", Path(__file__).with_name(worker)
    (ranks,) = {str(case.world) for case in cases.values()}
    launch = [
        str(program),
        "--hostfile",
        "none",
        "--num_gpus",
        ranks,
        "--master_port",
        str(free_port()),
        str(script),
    ]
    result = subprocess.run(launch, env=environment, capture_output=True, text=True, timeout=1800)
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

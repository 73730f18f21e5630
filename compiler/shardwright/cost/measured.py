"""How far the cost model was off on published runs that it had not seen: measured.json, of `make bench-cost`."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredError:
    """Mean absolute errors as shares, each project's runs predicted with constants fitted to the others."""

    step_time: float
    memory: float
    runs: int
    projects: int


@functools.cache
def measured_error() -> MeasuredError:
    data = json.loads(resources.files("shardwright.cost").joinpath("measured.json").read_text("utf-8"))
    return MeasuredError(
        step_time=data["step_time"], memory=data["memory"], runs=data["runs"], projects=data["projects"]
    )

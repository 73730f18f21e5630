"""What the parent tells its measuring processes, and what they tell it: JSON files in a folder of
its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from shardwright.calibrate.measurement_plan import ProductShape
from shardwright.recipe.literal_types import Checkpointing, Precision
from shardwright.utils.json_records import read_record

JOB = "job.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerJob:
    """folder: compiled, of the model's kinds of layers at this tensor degree. places: in the whole
    model's graph, of the copy's decoder layers in their order; last: of the head."""

    folder: str
    tensor: int
    micro_batches: tuple[int, ...]
    checkpointing: tuple[Checkpointing, ...]
    places: tuple[int, ...]
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineJob:
    """folders: compiled, with short rows; of one decoder layer and of two, of one micro-batch and
    of several."""

    zero_stage: int
    folders: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """seconds: to measure for, after the imports. ranks_per_node: processes on each node.
    uses_cpu_time: a process has one thread, whose own time no other work on the machine is in."""

    is_cpu: bool
    precision: Precision
    threads: int
    uses_cpu_time: bool
    seconds: float
    ranks: int
    ranks_per_node: int
    products: tuple[ProductShape, ...]
    attention: tuple[int, ...]
    heads: int
    head_dim: int
    layers: tuple[LayerJob, ...]
    engine: tuple[EngineJob, ...]

    def write(self, folder: Path) -> None:
        (folder / JOB).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @staticmethod
    def read(folder: Path) -> Job:
        return read_record(Job, json.loads((folder / JOB).read_text(encoding="utf-8")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds (or bytes, where `what` says so) of one thing, each repeat. sizes: what tells it from
    others."""

    what: str
    sizes: Mapping[str, int]
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessResult:
    """By one process. left_out: what could not be measured, and why."""

    device: str
    timed: tuple[Timing, ...]
    skipped: tuple[str, ...]

    @staticmethod
    def path(folder: Path, rank: int) -> Path:
        return folder / f"told-{rank:05d}.json"

    def write(self, folder: Path, rank: int) -> None:
        path = self.path(folder, rank)
        path.with_suffix(".part").write_text(json.dumps(asdict(self)), encoding="utf-8")
        path.with_suffix(".part").replace(path)

    @staticmethod
    def read(folder: Path, rank: int) -> ProcessResult:
        return read_record(
            ProcessResult, json.loads(ProcessResult.path(folder, rank).read_text(encoding="utf-8"))
        )

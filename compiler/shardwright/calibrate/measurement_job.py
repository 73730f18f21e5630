"""Exchange jobs and results with measuring processes, as JSON files in a temporary folder."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from shardwright.cost.calibrated_costs import representative_layers
from shardwright.cost.layer_shapes import model_shapes
from shardwright.layout.layout import Layout
from shardwright.layout.layout_estimate import Estimate
from shardwright.layout.planning_problem import Problem
from shardwright.recipe.literal_types import Checkpointing, Precision
from shardwright.utils.json_values import read_record

# The measurement plan: what the recipe's search needs, the likeliest layouts first.


MOST_PRODUCTS = 24
MOST_TOKENS = 65_536
"""Largest micro-batch that is timed (tokens): larger ones lie on the same line."""
ATTENTION_LENGTHS = (2048, 4096, 8192, 16_384, 32_768, 65_536)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductShape:
    """Describe a matrix product (m, k) by (k, n)."""

    m: int
    n: int
    k: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCases:
    """List what to measure of the layers at one tensor degree; micro-batches in order of value."""

    tensor: int
    micro_batches: tuple[int, ...]
    checkpointing: tuple[Checkpointing, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementPlan:
    """List what to measure.

    places: indices in graph.layers of one decoder layer of each kind.
    """

    products: tuple[ProductShape, ...]
    attention: tuple[int, ...]
    layers: tuple[LayerCases, ...]
    zero_stages: tuple[int, ...]
    places: tuple[int, ...]


def measurement_plan(problem: Problem, ranked: Sequence[Estimate]) -> MeasurementPlan:
    """Plan the measurements.

    ranked: the search's layouts, best first.
    """
    strategies = [estimate.strategy for estimate in ranked]
    degrees = list(dict.fromkeys(s.tensor for s in strategies)) or [1]
    shapes = model_shapes(problem.graph, 1)
    decoders = {
        first
        for first, kind in zip(representative_layers(shapes.kind_of), shapes.kind_of, strict=True)
        if kind >= 0
    }
    return MeasurementPlan(
        products=tuple(dict.fromkeys(_products(problem, strategies)))[:MOST_PRODUCTS],
        attention=ATTENTION_LENGTHS,
        layers=tuple(
            _layers(problem, [s for s in strategies if s.tensor == t], t) for t in degrees
        ),
        zero_stages=tuple(sorted({s.zero_stage for s in strategies})) or (0,),
        places=tuple(sorted(decoders)),
    )


def _layers(problem: Problem, strategies: Sequence[Layout], tensor: int) -> LayerCases:
    longest = max(1, MOST_TOKENS // problem.recipe.training.sequence_length)
    sizes = {min(s.micro_batch_size, longest) for s in strategies} or {1}
    modes = dict.fromkeys(s.checkpointing for s in strategies if not s.sequence_parallel)
    return LayerCases(
        tensor=tensor,
        micro_batches=pick_micro_batch_sizes(sizes),
        # Lists of modules are Megatron-Core's; the layers that are measured are Hugging Face's.
        checkpointing=("none", *(m for m in modes if not isinstance(m, tuple) and m != "none")),
    )


def pick_micro_batch_sizes(sizes: Iterable[int]) -> tuple[int, ...]:
    """Return at most four sizes: both ends first, as a line needs two, then sizes between them."""
    ordered = sorted(set(sizes))
    if len(ordered) <= 2:
        return tuple(ordered)
    places = (0, len(ordered) - 1, len(ordered) // 2, len(ordered) // 4)
    return tuple(dict.fromkeys(ordered[place] for place in places))


def _products(problem: Problem, strategies: Sequence[Layout]) -> Iterable[ProductShape]:
    """Yield the products of a decoder layer and of the head, as these layouts' ranks run them."""
    recipe, graph = problem.recipe, problem.graph
    for s in strategies:
        shapes, m = (
            model_shapes(graph, s.tensor),
            min(MOST_TOKENS, s.micro_batch_size * recipe.training.sequence_length),
        )
        for kind in shapes.kinds:
            yield from (ProductShape(m=m, n=p.n, k=p.k) for p in kind.products if p.batch == 1)
        yield ProductShape(m=m, n=shapes.head_width, k=graph.hidden_size)


JOB = "job.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerJob:
    """Describe layers to measure.

    folder: compiled, with the model's kinds of layers at this tensor degree.
    places: indices in the full model's graph of the copy's decoder layers.
    last: index of the head.
    """

    folder: str
    tensor: int
    micro_batches: tuple[int, ...]
    checkpointing: tuple[Checkpointing, ...]
    places: tuple[int, ...]
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineJob:
    """Describe engine steps to measure.

    folders: compiled with short sequences, for one and two decoder layers, one and several
        micro-batches.
    """

    zero_stage: int
    folders: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Describe all measurements.

    seconds: time to measure, after imports.
    ranks_per_node: processes on each node.
    uses_cpu_time: whether to use the process's CPU time, which leaves out other work on the
        machine.
    """

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
    """Hold the seconds (or bytes, where `what` says so) of each repeat.

    sizes: sizes that identify the case.
    """

    what: str
    sizes: Mapping[str, int]
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessResult:
    """Hold one process's results.

    skipped: what could not be measured, and why.
    """

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


# Description of the machine.


def cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def versions() -> dict[str, str]:
    installed = {}
    for name in ("shardwright", "torch", "deepspeed", "transformers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return installed

"""Cases for the sleeping engines, their measurement, and the simulation's answer to the same
case."""

from __future__ import annotations

import functools
import itertools
import json
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from deepspeed.runtime.utils import partition_balanced, partition_uniform

from shardwright.cost.layer_times import pass_times
from shardwright.cost.priced_layout import PricedLayout
from shardwright.layout.layout import Layout
from shardwright.layout.pipeline_step_time import step_seconds
from shardwright.models.graph_builder import build_model_graph
from shardwright.models.model_graph import ModelGraph
from shardwright.search.layout_resolution import with_stages_assigned
from shardwright.utils.child_processes import free_port
from tests.unit.models.factory import model_section, problem_of, recipe_of

ROOT = Path(__file__).resolve().parents[2]
MODELS = (
    "meta-llama/Llama-3.2-3B",
    "google/gemma-2-9b",
    "Qwen/Qwen2.5-7B",
    "meta-llama/Llama-3.1-8B",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Stages that sleep; seconds of one micro-batch per stage."""

    name: str
    schedule: str
    micro_batches: int
    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]

    @property
    def ranks(self) -> int:
        return len(self.forward_seconds) // (2 if self.schedule == "dualpipev" else 1)


def case(name: str, schedule: str, micro_batches: int, forward: list[float]) -> Case:
    """Backward twice as long."""
    return Case(
        name=name,
        schedule=schedule,
        micro_batches=micro_batches,
        forward_seconds=tuple(forward),
        backward_seconds=tuple(2 * x for x in forward),
    )


def measured(
    cases: list[Case], folder: Path, repeats: int, timeout_seconds: float
) -> list[list[float]]:
    """Seconds of each case, each repeat a round over all of them, so that what disturbs the machine
    disturbs all.

    Cases of one number of ranks share their processes.
    """
    found: list[list[float]] = [[] for _ in cases]
    for ranks in sorted({c.ranks for c in cases}):
        mine = [i for i, c in enumerate(cases) if c.ranks == ranks] * repeats
        file, out = folder / f"cases-{ranks}.json", folder / f"seconds-{ranks}.json"
        file.write_text(json.dumps([asdict(cases[i]) for i in mine]))
        command = [
            sys.executable,
            "-m",
            "tests.schedule.sleepers",
            str(ranks),
            str(free_port()),
            str(file),
            str(out),
        ]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_seconds
        )
        if done.returncode:
            raise RuntimeError(
                f"{' '.join(command)} exited {done.returncode}:\n{done.stderr[-4000:]}"
            )
        for i, seconds in zip(mine, json.loads(out.read_text()), strict=True):
            found[i].append(seconds)
    return found


def simulated(c: Case, per_call_seconds: float) -> float:
    """A call is one pass: the engine's own work around it, which the stages' sleep does not
    hold."""
    forward, backward = (
        tuple(x + per_call_seconds for x in seconds)
        for seconds in (c.forward_seconds, c.backward_seconds)
    )
    return step_seconds(c.schedule, c.micro_batches, forward, backward, 0.0)


def errors(cases: list[Case], seconds: list[float], per_call_seconds: float) -> list[float]:
    """Relative, of the simulation against the measurement."""
    return [simulated(c, per_call_seconds) / s - 1 for c, s in zip(cases, seconds, strict=True)]


def fitted_per_call_seconds(cases: list[Case], seconds: list[float]) -> float:
    """The one constant, to 10 microseconds: least sum of absolute relative errors."""
    return min(
        (i * 1e-5 for i in range(2001)), key=lambda x: sum(map(abs, errors(cases, seconds, x)))
    )


@functools.cache
def layout_of(model: str, pipeline: int, micro_batches: int) -> PricedLayout:
    """On H100s, sequences of 4096, full recomputation; memory ignored, as DeepSpeed's methods
    do."""
    recipe = recipe_of(training={"sequence_length": 4096}, assume={"ignore_memory": True})
    graph = build_model_graph(model_section(source=model))
    s = Layout(
        tensor=1,
        pipeline=pipeline,
        data=1,
        zero_stage=1,
        micro_batch_size=1,
        gradient_accumulation_steps=micro_batches,
        activation_checkpointing="full",
        schedule="1f1b",
        offload="none",
    )
    return with_stages_assigned(problem_of(recipe, graph), s)


def partitions(layout: PricedLayout) -> dict[str, tuple[int, ...]]:
    """Boundaries over the layers: ours, and those of DeepSpeed's partition_method by its own
    functions."""
    ours = (*(blocks[0].start for blocks in layout.ranks), len(layout.graph.layers))
    return {"ours": ours, **deepspeeds(layout.graph, layout.strategy.stages)}


def deepspeeds(graph: ModelGraph, stages: int) -> dict[str, tuple[int, ...]]:
    """As pipe/module.py, _partition_layers."""
    parameters = [layer.numel for layer in graph.layers]
    decoders = [int(layer.kind == "decoder") for layer in graph.layers]
    return {
        "parameters": tuple(map(int, partition_balanced(parameters, stages))),
        "uniform": tuple(map(int, partition_uniform(len(parameters), stages))),
        "type:decoder": tuple(map(int, partition_balanced(decoders, stages))),
    }


def partition_case(
    name: str, layout: PricedLayout, cut: tuple[int, ...], mean_stage_seconds: float
) -> Case:
    """The layers' seconds by the cost model, scaled to this much per stage and micro-batch, forward
    and backward."""
    found = pass_times(layout)
    whole = found.forward_compute[-1] + found.backward_compute[-1]
    scale = mean_stage_seconds * layout.strategy.stages / whole
    forward, backward = (
        tuple(scale * (sums[b] - sums[a]) for a, b in itertools.pairwise(cut))
        for sums in (found.forward_compute, found.backward_compute)
    )
    return Case(
        name=name,
        schedule=layout.strategy.schedule,
        micro_batches=layout.strategy.gradient_accumulation_steps,
        forward_seconds=forward,
        backward_seconds=backward,
    )


def median(values: list[float]) -> float:
    return statistics.median(values)

"""How far the cost model was off on published runs that it had not seen, and which layouts such runs stand behind:
measured.json, of `make bench-cost`. Where none does, no error is known, and none is told."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from importlib import resources

from shardwright.engines.kernels import KERNELS
from shardwright.engines.table import title_of
from shardwright.ir.cluster import Cluster
from shardwright.ir.recipe import Recipe
from shardwright.layout.estimate import PredictionError
from shardwright.layout.experts import experts_of
from shardwright.layout.problem import Problem
from shardwright.layout.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Zero:
    """Runs of one ZeRO stage, inside a node or over several, most_nodes at most. engine: as title_of takes it."""

    stage: int
    several_nodes: bool
    engine: str
    most_nodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was measured, step times or peak memory. error: the mean absolute one as a share, each project's runs
    predicted with constants fitted to the others. gpus: generations ("a100"). The rest: values that runs had."""

    error: float
    runs: int
    gpus: tuple[str, ...]
    zero: tuple[Zero, ...]
    precisions: tuple[str, ...]
    schedules: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    time: Measured
    memory: Measured
    projects: int


@functools.cache
def bench() -> Bench:
    data = json.loads(resources.files("shardwright.cost").joinpath("measured.json").read_text("utf-8"))

    def measured(name: str) -> Measured:
        entry = data[name]
        return Measured(
            error=entry["error"],
            runs=entry["runs"],
            gpus=tuple(entry["gpus"]),
            zero=tuple(Zero(**each) for each in entry["zero"]),
            precisions=tuple(entry["precisions"]),
            schedules=tuple(entry["schedules"]),
        )

    return Bench(time=measured("time"), memory=measured("memory"), projects=data["projects"])


def prediction_error(problem: Problem, strategy: Strategy) -> PredictionError:
    """None where no published run is of the layout's kind; the reasons say which kind that is."""
    time = _unmeasured(problem, strategy, bench().time)
    memory = _unmeasured(problem, strategy, bench().memory)
    return PredictionError(
        step_time=None if time else bench().time.error,
        memory=None if memory else bench().memory.error,
        step_time_reason=time,
        memory_reason=memory,
    )


def collectives_of(target: str, kernels: str, zero_stage: int) -> str:
    """Whose collectives are predicted (decision 020). kernels: as `assume` says."""
    return (KERNELS[kernels].zero_3 if zero_stage == 3 else None) or target


def _unmeasured(problem: Problem, s: Strategy, runs: Measured) -> str:
    """What the layout is that no run was; "" where runs stand behind it."""
    recipe, graph, cluster = problem.recipe, problem.graph, problem.cluster
    if cluster.gpu.is_cpu:
        return "a CPU"
    if cluster.gpu.name.partition("-")[0] not in runs.gpus:
        return "a GPU of your own numbers" if cluster.gpu.name == "inline" else cluster.gpu.name
    if experts_of(graph) > 1:
        return "a mixture of experts"
    if recipe.training.precision not in runs.precisions:
        return recipe.training.precision
    if recipe.lora is not None:
        return "LoRA"
    if s.offload != "none":
        return f"offload: {s.offload}"
    if s.pipeline > 1 and s.schedule not in runs.schedules:
        return f"schedule: {s.schedule}"
    return _unmeasured_zero(recipe, cluster, s, runs)


def _unmeasured_zero(recipe: Recipe, cluster: Cluster, s: Strategy, runs: Measured) -> str:
    """Inside a node every engine's runs count; between nodes they differ in how they use the links."""
    engine, several = collectives_of(recipe.target, recipe.assume.kernels, s.zero_stage), cluster.nodes > 1
    most = max(
        (
            zero.most_nodes
            for zero in runs.zero
            if (zero.stage, zero.several_nodes) == (s.zero_stage, several) and (not several or zero.engine == engine)
        ),
        default=0,
    )
    if cluster.nodes <= most:
        return ""
    if not several:
        return f"ZeRO-{s.zero_stage} inside one node"
    where = f"over more than {most} nodes" if most else "over several nodes"
    return f"{title_of(engine)}'s ZeRO-{s.zero_stage} {where}"


def error_words(error: PredictionError) -> str:
    """Of one layout."""
    if error.step_time is None and error.step_time_reason == error.memory_reason:
        return unmeasured(error.step_time_reason)
    parts = [
        f"{words} ± {share:.1%}" if share is not None else f"{words} {unmeasured(reason)}"
        for words, share, reason in (
            ("the step", error.step_time, error.step_time_reason),
            ("the memory", error.memory, error.memory_reason),
        )
    ]
    return f"{'; '.join(parts)}; ±: {source()}"


def flops_words(source: str) -> str:
    """What is less sure of a prediction whose FLOPs were not traced; "" where they were."""
    if source == "traced":
        return ""
    reason = source.removeprefix("counted: ")
    return (
        "counted from the parameters' shapes, so the step and the memory are less sure: the model's own code could not "
        f"be traced ({reason})"
    )


def unmeasured(reason: str) -> str:
    return f"not calibrated ({reason}): no published run is of that kind"


def source() -> str:
    """Of the ±."""
    return (
        f"the mean error on {bench().time.runs} published runs, each of {bench().projects} projects predicted from the "
        "others (make bench-cost)"
    )

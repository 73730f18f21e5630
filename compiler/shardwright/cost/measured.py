"""How far the cost model was off on published runs whose source it had not seen, by regime: measured.json, of
`make bench-cost`.

A regime is what bounds a step and who ran it. Its error is the half-width that holds 80 % of its runs. Fewer than 20
runs tell none: the regime around it does, of less that is the same. Where no run is of the layout's kind, the widest
error that is known is told, and that it is not calibrated.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

from shardwright.cost.layout import Layout
from shardwright.cost.passes import passes
from shardwright.engines.table import family_of, title_of
from shardwright.ir.json_value import JsonValue
from shardwright.ir.recipe import Recipe
from shardwright.layout.estimate import PredictionError
from shardwright.layout.experts import experts_of

LEAST_RUNS = 20
LONG_TOKENS = 16_384
MANY_NODES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """half_width: of predicted over measured less 1, the one that holds 80 % of the runs."""

    runs: int
    half_width: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was measured, step times or peak memory. error: the mean absolute one over the projects as a share, each
    project's runs predicted with constants fitted to the others. gpus: generations ("a100"). bands: of regimes, by
    their names (see regimes). widest: the widest half-width of those with enough runs. The rest: values that runs had.
    """

    error: float
    runs: int
    gpus: tuple[str, ...]
    precisions: tuple[str, ...]
    schedules: tuple[str, ...]
    bands: Mapping[str, Band]
    widest: float


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
        bands = {regime: Band(**each) for regime, each in entry["bands"].items()}
        return Measured(
            error=entry["error"],
            runs=entry["runs"],
            gpus=tuple(entry["gpus"]),
            precisions=tuple(entry["precisions"]),
            schedules=tuple(entry["schedules"]),
            bands=bands,
            widest=max(band.half_width for band in bands.values() if band.runs >= LEAST_RUNS),
        )

    return Bench(time=measured("time"), memory=measured("memory"), projects=data["projects"])


EVERYTHING = "all engines"


def regimes(layout: Layout) -> tuple[str, ...]:
    """Names of what the layout's step belongs to, from the narrowest to all runs. Each holds the one before it."""
    s, recipe, nodes = layout.strategy, layout.recipe, layout.cluster.nodes
    engine, family = title_of(recipe.target, recipe.assume.kernels), family_of(recipe.target, recipe.assume.kernels)
    kind = kind_of(layout)
    bound = ", host-bound" if passes(layout).is_host_bound else ""
    where = "one node" if nodes == 1 else f"2 to {MANY_NODES} nodes" if nodes <= MANY_NODES else "more nodes"
    if s.pipeline > 1 and nodes > 1:
        where = f"a pipeline over {where}"
    return (
        f"{engine}, ZeRO-{s.zero_stage}, {kind}{bound}, {where}",
        f"{engine}, {kind}{bound}, {where}",
        f"{engine}, {kind}{bound}",
        f"{engine}, {kind}",
        engine,
        family,
        EVERYTHING,
    )


def kind_of(layout: Layout) -> str:
    if layout.strategy.offload != "none":
        return "offload"
    if experts_of(layout.graph) > 1:
        return "experts"
    return "long rows" if layout.recipe.training.sequence_length > LONG_TOKENS else "plain"


def prediction_error(layout: Layout) -> PredictionError:
    """No share where no published run is of the layout's kind; the reasons say which kind that is."""
    time, memory = bench().time, bench().memory
    time_reason, memory_reason = _unmeasured(layout, time), _unmeasured(layout, memory)
    time_name, time_band = _band(layout, time)
    memory_name, memory_band = _band(layout, memory)
    return PredictionError(
        step_time=None if time_reason else time_band.half_width,
        memory=None if memory_reason else memory_band.half_width,
        step_time_reason=time_reason,
        memory_reason=memory_reason,
        step_time_regime="" if time_reason else f"{time_name}: {time_band.runs} runs",
        memory_regime="" if memory_reason else f"{memory_name}: {memory_band.runs} runs",
    )


def widest(error: PredictionError) -> tuple[float, float]:
    """Half-widths of the step time and the memory: those of the regime, or the widest that are known."""
    time = bench().time.widest if error.step_time is None else error.step_time
    memory = bench().memory.widest if error.memory is None else error.memory
    return time, memory


def regime_words(error: PredictionError) -> str:
    """Of the step time."""
    return error.step_time_regime or f"not calibrated ({error.step_time_reason})"


def error_fields(error: PredictionError) -> dict[str, dict[str, JsonValue]]:
    """What `--json` says of it beside the figures that it is of: part of an estimate -> keys and values."""
    step, peak = widest(error)
    return {
        "time": {"step_error_fraction": step, "error_regime": regime_words(error)},
        "memory": {"peak_error_fraction": peak},
    }


def _band(layout: Layout, runs: Measured) -> tuple[str, Band]:
    """Of the narrowest regime with enough runs."""
    found = ((name, runs.bands[name]) for name in regimes(layout) if name in runs.bands)
    return next((name, band) for name, band in found if band.runs >= LEAST_RUNS)


def _unmeasured(layout: Layout, runs: Measured) -> str:
    """What the layout is that no run was; "" where runs stand behind it."""
    recipe, gpu, s = layout.recipe, layout.cluster.gpu, layout.strategy
    if gpu.is_cpu:
        return "a CPU"
    if gpu.name.partition("-")[0] not in runs.gpus:
        return "a GPU of your own numbers" if gpu.name == "inline" else gpu.name
    if recipe.training.precision not in runs.precisions:
        return recipe.training.precision
    if recipe.lora is not None:
        return "LoRA"
    if s.context > 1:
        return f"context: {s.context}"
    if s.pipeline > 1 and s.schedule not in runs.schedules:
        return f"schedule: {s.schedule}"
    return _unmeasured_kind(layout, recipe, runs)


def _unmeasured_kind(layout: Layout, recipe: Recipe, runs: Measured) -> str:
    engine, family = title_of(recipe.target, recipe.assume.kernels), family_of(recipe.target, recipe.assume.kernels)
    kind = kind_of(layout)
    known = any(name in runs.bands for name in (f"{engine}, {kind}", f"{family}, {kind}"))
    return "" if known else f"{engine}, {kind}"


def error_words(error: PredictionError) -> str:
    """Of one layout."""
    if error.step_time is None and error.step_time_reason == error.memory_reason:
        return unmeasured(error.step_time_reason)
    parts = [
        f"{words} ± {share:.1%} ({regime})" if share is not None else f"{words} {unmeasured(reason)}"
        for words, share, reason, regime in (
            ("the step", error.step_time, error.step_time_reason, error.step_time_regime),
            ("the memory", error.memory, error.memory_reason, error.memory_regime),
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
        f"holds 80 % of the regime's published runs, of {bench().time.runs} of {bench().projects} projects, each "
        "predicted from the others (make bench-cost)"
    )

"""How far the cost model was off on published runs whose source it had not seen, by regime:
measured.json, of `make bench-cost`.

A regime is who ran a step, its kind (plain, experts, long rows, offload) and what bounds it. Its
error is the half-width that holds 80 % of its runs. Fewer than 20 runs, or runs of one source, tell
none: the regime around it does, of the same kind and of an engine that is predicted alike. A regime
without a run of the layout's GPU generation tells none either, and no regime of another kind or
precision does: then the layout is not calibrated, and has no error.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

from shardwright.cost.layer_times import pass_times
from shardwright.cost.priced_layout import PricedLayout
from shardwright.engines.engine_table import engine_family, engine_title
from shardwright.layout.layout_estimate import PredictionError
from shardwright.models.expert_modules import experts_per_layer
from shardwright.utils.json_values import JsonValue

LEAST_RUNS, LEAST_SOURCES = 20, 2
LONG_TOKENS = 16_384
MANY_NODES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RegimeErrors:
    """half_width: of predicted over measured less 1, the one that holds 80 % of the runs. sources:
    projects that published them. gpus: generation ("Hopper") -> its runs."""

    runs: int
    half_width: float
    sources: int
    gpus: Mapping[str, int]

    @property
    def has_enough_runs(self) -> bool:
        """Whether its runs are enough to say how far a prediction is off."""
        return self.runs >= LEAST_RUNS and self.sources >= LEAST_SOURCES


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedErrors:
    """What was measured, step times or peak memory. error: the mean absolute one over the projects
    as a share, each project's runs predicted with constants fitted to the others. bands: of
    regimes, by their names (see regimes). The rest: values that runs had.
    """

    error: float
    runs: int
    precisions: tuple[str, ...]
    schedules: tuple[str, ...]
    bands: Mapping[str, RegimeErrors]


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorBenchmark:
    time: PublishedErrors
    memory: PublishedErrors
    projects: int


@functools.cache
def error_benchmark() -> ErrorBenchmark:
    data = json.loads(
        resources.files("shardwright.cost").joinpath("prediction_errors.json").read_text("utf-8")
    )

    def measured(name: str) -> PublishedErrors:
        entry = data[name]
        bands = {regime: RegimeErrors(**each) for regime, each in entry["bands"].items()}
        return PublishedErrors(
            error=entry["error"],
            runs=entry["runs"],
            precisions=tuple(entry["precisions"]),
            schedules=tuple(entry["schedules"]),
            bands=bands,
        )

    return ErrorBenchmark(
        time=measured("time"), memory=measured("memory"), projects=data["projects"]
    )


# The catalogue's names start with the GPU's.
_GENERATIONS = {
    "v100": "Volta",
    **dict.fromkeys(("a100", "a800"), "Ampere"),
    **dict.fromkeys(("h100", "h200", "h800", "h20", "gh200"), "Hopper"),
    **dict.fromkeys(("b200", "b300", "gb200", "gb300"), "Blackwell"),
}


def generation_of(gpu: str) -> str:
    """gpu: as the catalogue or a published row names it. The name's own first part where no table
    has it."""
    first = gpu.partition("-")[0].lower()
    return _GENERATIONS.get(first, first)


def regimes(layout: PricedLayout) -> tuple[str, ...]:
    """Names of what the layout's step belongs to, from the narrowest to all runs of its kind that
    are predicted alike. Each holds the one before it."""
    s, recipe, nodes = layout.strategy, layout.recipe, layout.cluster.nodes
    engine, family = (
        engine_title(recipe.target, recipe.assume.kernels),
        engine_family(recipe.target, recipe.assume.kernels),
    )
    kind = workload_of(layout)
    bound = ", host-bound" if pass_times(layout).is_host_bound else ""
    where = (
        "one node"
        if nodes == 1
        else f"2 to {MANY_NODES} nodes"
        if nodes <= MANY_NODES
        else "more nodes"
    )
    if s.pipeline > 1 and nodes > 1:
        where = f"a pipeline over {where}"
    return (
        f"{engine}, ZeRO-{s.zero_stage}, {kind}{bound}, {where}",
        f"{engine}, {kind}{bound}, {where}",
        f"{engine}, {kind}{bound}",
        f"{engine}, {kind}",
        f"{family}, {kind}",
    )


def workload_of(layout: PricedLayout) -> str:
    if layout.strategy.offload != "none":
        return "offload"
    if experts_per_layer(layout.graph) > 1:
        return "experts"
    return "long rows" if layout.recipe.training.sequence_length > LONG_TOKENS else "plain"


def prediction_error(layout: PricedLayout) -> PredictionError:
    """No share where no published runs stand behind the layout's regime; the reasons say which one
    that is."""
    names = regimes(layout)
    time = _error(layout, error_benchmark().time, names)
    memory = _error(layout, error_benchmark().memory, names)
    return PredictionError(
        step_time=time.share,
        memory=memory.share,
        step_time_reason=time.reason,
        memory_reason=memory.reason,
        step_time_regime=time.regime,
        memory_regime=memory.regime,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Error:
    """reason: why there is no share. regime: its name and its runs' number, where there is one."""

    share: float | None = None
    reason: str = ""
    regime: str = ""


def _error(layout: PricedLayout, runs: PublishedErrors, names: tuple[str, ...]) -> _Error:
    if reason := _uncalibrated_reason(layout, runs):
        return _Error(reason=reason)
    generation = generation_of(layout.cluster.gpu.name)
    found = [(name, runs.bands[name]) for name in names if name in runs.bands]
    found = [(name, band) for name, band in found if band.has_enough_runs]
    engine = engine_title(layout.recipe.target, layout.recipe.assume.kernels)
    kind = f"{engine}, {workload_of(layout)}"
    if not found:
        return _Error(reason=kind)
    if all(generation not in band.gpus for _, band in found):
        gpu = layout.cluster.gpu.name
        return _Error(reason=f"{kind}, {'a GPU of your own numbers' if gpu == 'inline' else gpu}")
    name, band = next((name, band) for name, band in found if generation in band.gpus)
    here = band.gpus[generation]
    words = f"{name}: {band.runs} runs" + (
        "" if here == band.runs else f", {here} of them on {generation}"
    )
    # Too few runs of the engine itself cannot make an error smaller, but they can show that it is
    # larger.
    own = runs.bands.get(kind)
    if own is not None and own.runs < band.runs and own.half_width > band.half_width:
        return _Error(share=own.half_width, regime=f"{words}; as wide as {own.runs} of {engine}")
    return _Error(share=band.half_width, regime=words)


def regime_text(error: PredictionError) -> str:
    """Of the step time."""
    return error.step_time_regime or f"not calibrated ({error.step_time_reason})"


def error_json_fields(error: PredictionError) -> dict[str, dict[str, JsonValue]]:
    """What `--json` says of it beside the figures that it is of: part of an estimate -> keys and
    values. null where no published runs stand behind the layout's regime."""
    return {
        "time": {"step_error_fraction": error.step_time, "error_regime": regime_text(error)},
        "memory": {"peak_error_fraction": error.memory},
    }


def _uncalibrated_reason(layout: PricedLayout, runs: PublishedErrors) -> str:
    """What the layout is that no run was; "" where runs stand behind it."""
    recipe, gpu, s = layout.recipe, layout.cluster.gpu, layout.strategy
    if gpu.is_cpu:
        return "a CPU"
    if all(generation_of(gpu.name) not in band.gpus for band in runs.bands.values()):
        return "a GPU of your own numbers" if gpu.name == "inline" else gpu.name
    if recipe.training.precision not in runs.precisions:
        return recipe.training.precision
    if recipe.lora is not None:
        return "LoRA"
    if s.context > 1:
        return f"context: {s.context}"
    if s.pipeline > 1 and s.schedule not in runs.schedules:
        return f"schedule: {s.schedule}"
    return ""

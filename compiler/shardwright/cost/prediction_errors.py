"""Look up the cost model's error on published runs that it was not fitted to, by regime.

prediction_errors.json (of `make bench-cost`) holds the errors. A regime is an engine, a kind of run
(plain, experts, context ranks, long rows, offload), a GPU generation, a precision and a bottleneck.
Its error is the half-width that holds 80 % of its runs. With fewer than 20 runs, or runs of one
source, the wider regime of the same kind, generation and precision counts; without one, the layout
is not calibrated.
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
    """Hold the errors of a regime.

    half_width: of predicted over measured less 1, which holds 80 % of the runs
    sources: projects that published the runs
    """

    runs: int
    half_width: float
    sources: int

    @property
    def has_enough_runs(self) -> bool:
        """Return whether the runs are enough to give an error."""
        return self.runs >= LEAST_RUNS and self.sources >= LEAST_SOURCES


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedErrors:
    """Hold the errors of step times or of peak memory.

    error: mean absolute error over the projects (fraction), each predicted with constants fitted to
        the others
    precisions, schedules: values in the runs
    bands: errors by regime name (see regimes)
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


# GPU generations by the first part of the catalogue's names.
_GENERATIONS = {
    "v100": "Volta",
    **dict.fromkeys(("a100", "a800"), "Ampere"),
    **dict.fromkeys(("h100", "h200", "h800", "h20", "gh200"), "Hopper"),
    **dict.fromkeys(("b200", "b300", "gb200", "gb300"), "Blackwell"),
    **dict.fromkeys(("mi300x", "mi325x"), "CDNA 3"),
    **dict.fromkeys(("mi350x", "mi355x"), "CDNA 4"),
}


def generation_of(gpu: str) -> str:
    """Return a GPU's generation, or the first part of its name where it has none.

    gpu: as named by the catalogue or a published row
    """
    first = gpu.partition("-")[0].lower()
    return _GENERATIONS.get(first, first)


def regimes(priced: PricedLayout) -> tuple[str, ...]:
    """Return the names of the layout's regimes, each inside the next.

    The last one holds all runs of its kind with a similar engine.
    """
    s, recipe, nodes = priced.strategy, priced.recipe, priced.cluster.nodes
    engine, family = (
        engine_title(recipe.target, recipe.assume.kernels),
        engine_family(recipe.target, recipe.assume.kernels),
    )
    kind = workload_of(priced)
    bound = ", host-bound" if pass_times(priced).is_host_bound else ""
    where = (
        "one node"
        if nodes == 1
        else f"2 to {MANY_NODES} nodes"
        if nodes <= MANY_NODES
        else "more nodes"
    )
    if s.pipeline > 1 and nodes > 1:
        where = f"a pipeline over {where}"
    alike = hardware_of(priced)
    return (
        f"{engine}, ZeRO-{s.zero_stage}, {kind}{bound}, {where}, {alike}",
        f"{engine}, {kind}{bound}, {where}, {alike}",
        f"{engine}, {kind}{bound}, {alike}",
        f"{engine}, {kind}, {alike}",
        f"{family}, {kind}, {alike}",
    )


def hardware_of(priced: PricedLayout) -> str:
    """Name the GPU's generation, and low precision, which every run of a regime shares."""
    low = "" if priced.recipe.training.low_precision == "none" else ", low precision"
    return generation_of(priced.cluster.gpu.name) + low


def workload_of(priced: PricedLayout) -> str:
    if priced.strategy.offload != "none":
        return "offload"
    if experts_per_layer(priced.graph) > 1:
        return "experts"
    if priced.strategy.context > 1:
        return "context ranks"
    return "long rows" if priced.recipe.training.sequence_length > LONG_TOKENS else "plain"


def prediction_error(priced: PricedLayout) -> PredictionError:
    """Return the layout's expected error, or the reason why it has none."""
    names = regimes(priced)
    time = _error(priced, error_benchmark().time, names)
    memory = _error(priced, error_benchmark().memory, names)
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
    """Hold an error or its absence.

    share: the half-width; None with a reason
    regime: the regime's name and number of runs
    """

    share: float | None = None
    reason: str = ""
    regime: str = ""


def _error(priced: PricedLayout, runs: PublishedErrors, names: tuple[str, ...]) -> _Error:
    if reason := _uncalibrated_reason(priced, runs):
        return _Error(reason=reason)
    found = [(name, runs.bands[name]) for name in names if name in runs.bands]
    found = [(name, band) for name, band in found if band.has_enough_runs]
    engine = engine_title(priced.recipe.target, priced.recipe.assume.kernels)
    kind = f"{engine}, {workload_of(priced)}, {hardware_of(priced)}"
    if not found:
        return _Error(reason=kind)
    name, band = found[0]
    words = f"{name}: {band.runs} runs"
    # A few runs of the engine itself cannot lower the error, but they can raise it.
    own = runs.bands.get(kind)
    if own is not None and own.runs < band.runs and own.half_width > band.half_width:
        return _Error(share=own.half_width, regime=f"{words}; as wide as {own.runs} of {engine}")
    return _Error(share=band.half_width, regime=words)


def regime_text(error: PredictionError) -> str:
    """Name the regime of the step time."""
    return error.step_time_regime or f"not calibrated ({error.step_time_reason})"


def error_json_fields(error: PredictionError) -> dict[str, dict[str, JsonValue]]:
    """Return the error keys of `--json` by part of an estimate; null without published runs."""
    return {
        "time": {"step_error_fraction": error.step_time, "error_regime": regime_text(error)},
        "memory": {"peak_error_fraction": error.memory},
    }


def _uncalibrated_reason(priced: PricedLayout, runs: PublishedErrors) -> str:
    """Return the property of the layout that no published run has; "" where runs have all."""
    recipe, gpu, s = priced.recipe, priced.cluster.gpu, priced.strategy
    if gpu.is_cpu:
        return "a CPU"
    if gpu.name == "inline":
        return "an inline GPU"
    if recipe.training.precision not in runs.precisions:
        return recipe.training.precision
    if recipe.lora is not None:
        return "LoRA"
    if s.pipeline > 1 and s.schedule not in runs.schedules:
        return f"schedule: {s.schedule}"
    return ""

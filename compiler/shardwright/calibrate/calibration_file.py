"""What the processes timed, as the record that a recipe names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardwright.calibrate.constants_fit import fit_constants
from shardwright.calibrate.measurement_job import ProcessResult
from shardwright.calibrate.timing_repeats import median_figure, pooled
from shardwright.layout.planning_problem import Problem
from shardwright.recipe.literal_types import CHECKPOINTING
from shardwright.recipe.measurements import (
    KIND,
    VERSION,
    EngineMeasurement,
    LayerMeasurement,
    MeasuredMachine,
    MeasuredValue,
    Measurements,
    TimingSample,
)

SHOWN = (
    "product",
    "attention",
    "traffic",
    "optimizer",
    "cpu adam",
    "pinned copy",
    "all-reduce",
    "overlap",
    "host floor",
)
"""Samples that constants are fitted to, or that say how good these are."""


def measurements(
    problem: Problem, machine: MeasuredMachine, results: Sequence[ProcessResult]
) -> Measurements:
    rows = samples(results)
    shown = tuple(row for row in rows if row.what in SHOWN)
    return Measurements(
        kind=KIND,
        version=VERSION,
        machine=machine,
        model=problem.graph.config_hash,
        target=problem.recipe.target,
        sequence_length=problem.recipe.training.sequence_length,
        constants=fit_constants(problem.cluster, machine.precision, shown),
        layers=tuple(_layers(rows)),
        engine=tuple(_engine(rows)),
        samples=shown,
    )


def samples(results: Sequence[ProcessResult]) -> list[TimingSample]:
    """The repeats of all processes together."""
    found: dict[tuple[str, tuple[tuple[str, int], ...]], list[tuple[float, ...]]] = {}
    for one in results:
        for timed in one.timed:
            found.setdefault((timed.what, tuple(timed.sizes.items())), []).append(timed.seconds)
    return [
        TimingSample(what=what, sizes=dict(sizes), seconds=median_figure(pooled(each)))
        for (what, sizes), each in found.items()
    ]


def _layers(rows: Sequence[TimingSample]) -> Iterable[LayerMeasurement]:
    def by(part: str) -> dict[tuple[int, ...], MeasuredValue]:
        return {
            tuple(row.sizes.values()): row.seconds for row in rows if row.what == f"layer {part}"
        }

    for checkpointing in CHECKPOINTING:
        backward, kept = by(f"backward {checkpointing}"), by(f"bytes {checkpointing}")
        for where, forward in by(f"forward {checkpointing}").items():
            if forward.value > 0:
                place, tensor, micro_batch = where
                yield LayerMeasurement(
                    place=place,
                    tensor=tensor,
                    micro_batch_size=micro_batch,
                    activation_checkpointing=checkpointing,
                    forward_seconds=forward,
                    backward_seconds=backward[where],
                    kept_bytes=kept[where],
                )


def _engine(rows: Sequence[TimingSample]) -> Iterable[EngineMeasurement]:
    """From steps of one layer and two, of one micro-batch and several: what each adds, less the
    layers' own time."""
    steps = [row for row in rows if row.what == "engine step"]
    short = {row.sizes["place"]: row.seconds.value for row in rows if row.what == "short layer"}
    for stage in sorted({row.sizes["zero_stage"] for row in steps}):
        mine = {
            (row.sizes["layers"], row.sizes["micro_batches"]): row
            for row in steps
            if row.sizes["zero_stage"] == stage
        }
        if len(mine) != 4 or not short:
            continue
        few, many = sorted({m for _, m in mine})
        a_micro_batch = {
            layers: (mine[layers, many].seconds.value - mine[layers, few].seconds.value)
            / (many - few)
            for layers in (1, 2)
        }
        a_step = {n: mine[n, few].seconds.value - few * a_micro_batch[n] for n in (1, 2)}
        own_layer, ends = short.get(1, 0.0), short[0] + short[max(short)]
        layer = max(0.0, a_micro_batch[2] - a_micro_batch[1] - own_layer)
        sizes = [mine[n, few].sizes["parameters"] for n in (1, 2)]
        parameter = max(0.0, a_step[2] - a_step[1]) / max(1, sizes[1] - sizes[0])
        n, spread = (
            min(r.seconds.n for r in mine.values()),
            max(r.seconds.spread for r in mine.values()),
        )

        def results(value: float, n: int = n, spread: float = spread) -> MeasuredValue:
            return MeasuredValue(value=max(0.0, value), n=n, spread=spread)

        yield EngineMeasurement(
            zero_stage=stage,
            micro_batch_seconds=results(a_micro_batch[1] - own_layer - ends - layer),
            layer_seconds=results(layer),
            step_seconds=results(a_step[1] - parameter * sizes[0]),
            parameter_seconds=results(parameter),
        )

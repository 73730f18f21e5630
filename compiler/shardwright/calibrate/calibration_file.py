"""What the processes timed, as the record that a recipe names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardwright.calibrate.constants_fit import fitted
from shardwright.calibrate.measurement_job import Told
from shardwright.calibrate.timing_repeats import figure, pooled
from shardwright.layout.planning_problem import Problem
from shardwright.recipe.literal_types import CHECKPOINTING
from shardwright.recipe.measurements import (
    KIND,
    VERSION,
    EngineFigures,
    Figure,
    LayerFigures,
    Machine,
    Measurements,
    Sample,
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


def measurements(problem: Problem, machine: Machine, told: Sequence[Told]) -> Measurements:
    rows = samples(told)
    shown = tuple(row for row in rows if row.what in SHOWN)
    return Measurements(
        kind=KIND,
        version=VERSION,
        machine=machine,
        model=problem.graph.config_hash,
        target=problem.recipe.target,
        sequence_length=problem.recipe.training.sequence_length,
        constants=fitted(problem.cluster, machine.precision, shown),
        layers=tuple(_layers(rows)),
        engine=tuple(_engine(rows)),
        samples=shown,
    )


def samples(told: Sequence[Told]) -> list[Sample]:
    """The repeats of all processes together."""
    found: dict[tuple[str, tuple[tuple[str, int], ...]], list[tuple[float, ...]]] = {}
    for one in told:
        for timed in one.timed:
            found.setdefault((timed.what, tuple(timed.sizes.items())), []).append(timed.seconds)
    return [
        Sample(what=what, sizes=dict(sizes), seconds=figure(pooled(each)))
        for (what, sizes), each in found.items()
    ]


def _layers(rows: Sequence[Sample]) -> Iterable[LayerFigures]:
    def by(part: str) -> dict[tuple[int, ...], Figure]:
        return {
            tuple(row.sizes.values()): row.seconds for row in rows if row.what == f"layer {part}"
        }

    for checkpointing in CHECKPOINTING:
        backward, kept = by(f"backward {checkpointing}"), by(f"bytes {checkpointing}")
        for where, forward in by(f"forward {checkpointing}").items():
            if forward.value > 0:
                place, tensor, micro_batch = where
                yield LayerFigures(
                    place=place,
                    tensor=tensor,
                    micro_batch_size=micro_batch,
                    activation_checkpointing=checkpointing,
                    forward_seconds=forward,
                    backward_seconds=backward[where],
                    kept_bytes=kept[where],
                )


def _engine(rows: Sequence[Sample]) -> Iterable[EngineFigures]:
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

        def told(value: float, n: int = n, spread: float = spread) -> Figure:
            return Figure(value=max(0.0, value), n=n, spread=spread)

        yield EngineFigures(
            zero_stage=stage,
            micro_batch_seconds=told(a_micro_batch[1] - own_layer - ends - layer),
            layer_seconds=told(layer),
            step_seconds=told(a_step[1] - parameter * sizes[0]),
            parameter_seconds=told(parameter),
        )

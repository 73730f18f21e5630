"""Replace the cost model's figures by those of `cluster.measured`.

Measured constants apply to every model. Measured layers, engine overheads and runs apply to the
model, sequence length and engine that they were measured with; elsewhere the formulas apply.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Literal

from shardwright.cost.cost_constants import Constants, default_constants
from shardwright.diagnostics import Diagnostic, Refusal
from shardwright.layout.gpu_cluster import Cluster
from shardwright.layout.layout import Layout
from shardwright.layout.layout_estimate import Time
from shardwright.models.model_graph import ModelGraph
from shardwright.recipe.literal_types import LayerCheckpointing, PartialCheckpointing
from shardwright.recipe.measurements import (
    EngineMeasurement,
    Measurements,
    RunMeasurement,
)
from shardwright.recipe.recipe_types import Recipe

KEY = ("cluster", "measured")
Part = Literal["forward_seconds", "backward_seconds", "kept_bytes"]


def calibrated_constants(recipe: Recipe) -> Constants:
    """Return the default constants, with measured ones in their place. Raises Refusal with
    SW1303."""
    measured = recipe.cluster.measured
    if measured is None:
        return default_constants()
    check_calibration(recipe)
    return dataclasses.replace(
        default_constants(), **{n: f.value for n, f in measured.found.constants.items()}
    )


def calibration_errors(recipe: Recipe) -> tuple[Diagnostic, ...]:
    """Return SW1303 where the measurements do not apply to this recipe's machines."""
    measured = recipe.cluster.measured
    if measured is None:
        return ()
    found, wrong = measured.found, []
    machine, is_cpu = found.machine, recipe.cluster.gpu == "cpu"
    if machine.is_cpu != is_cpu:
        wrong.append(
            f"of {'a CPU' if machine.is_cpu else machine.device}, and cluster.gpu is "
            f"{recipe.cluster.gpu}"
        )
    if machine.precision != recipe.training.precision:
        wrong.append(
            f"in {machine.precision}, and training.precision is {recipe.training.precision}"
        )
    known = {field.name for field in dataclasses.fields(Constants)}
    strange = sorted(set(found.constants) - known)
    if strange:
        wrong.append(f"by another version, whose constant {strange[0]} this one lacks")
    zero = sorted(
        name for name, figure in found.constants.items() if name in known and not figure.value > 0
    )
    if zero and not wrong:
        wrong.append(f"with a {zero[0]} that is not above 0")
    return tuple(
        Diagnostic(
            code="SW1303",
            message=f"cluster.measured: its figures were measured {why}",
            help=(
                "`shardwright calibrate RECIPE -o FILE` measures for this recipe, on the machine "
                "where it runs."
            ),
            key=KEY,
        )
        for why in wrong
    )


def check_calibration(recipe: Recipe) -> None:
    """Raise Refusal with SW1303 where the measurements do not apply."""
    if wrong := calibration_errors(recipe):
        raise Refusal(*wrong, source=recipe.source)


def calibration_for(recipe: Recipe, graph: ModelGraph) -> Measurements | None:
    """Return the measurements of this very model; None where there are none."""
    measured = recipe.cluster.measured
    if measured is None or recipe.assume.mfu is not None or recipe.assume.kernels != "auto":
        return None
    found = measured.found
    same = (found.model, found.target, found.sequence_length) == (
        graph.config_hash,
        recipe.target,
        recipe.training.sequence_length,
    )
    return found if same else None


Seconds = tuple[float, float, float]


def measured_layer_seconds(
    recipe: Recipe, graph: ModelGraph, s: Layout, place: int, counted: Seconds
) -> Seconds:
    """Return a layer's (forward, backward, recompute) seconds of one micro-batch.

    counted: the formulas' seconds, returned where the layer was not measured at this tensor degree
    """
    forward = _measured(recipe, graph, s, place, "none", "forward_seconds")
    backward = _measured(recipe, graph, s, place, "none", "backward_seconds")
    if forward is None or backward is None:
        return counted
    whole = _measured(recipe, graph, s, place, s.checkpointing, "backward_seconds")
    if whole is not None:
        return forward, backward, max(0.0, whole - backward)
    return forward, backward, counted[2] * forward / counted[0] if counted[0] else counted[2]


def measured_activation_bytes(
    recipe: Recipe, graph: ModelGraph, s: Layout, place: int, checkpointing: LayerCheckpointing
) -> float | None:
    """Return a decoder layer's saved activation bytes of one micro-batch on a rank; None if not
    measured."""
    return _measured(recipe, graph, s, place, checkpointing, "kept_bytes")


def representative_layers(kind_of: Sequence[int]) -> tuple[int, ...]:
    """Return for each layer the first layer of the same kind.

    kind_of: as in ModelShapes
    """
    first: dict[int, int] = {}
    return tuple(
        first.setdefault(kind, place) if kind >= 0 else place for place, kind in enumerate(kind_of)
    )


def _measured(
    recipe: Recipe,
    graph: ModelGraph,
    s: Layout,
    place: int,
    checkpointing: LayerCheckpointing,
    part: Part,
) -> float | None:
    """Interpolate linearly between measured micro-batches, and extrapolate beyond them."""
    found = calibration_for(recipe, graph)
    if found is None or s.sequence_parallel or s.expert > 1 or s.context > 1:
        return None
    rows = [row for row in found.layers if row.place == place and row.tensor == s.tensor]
    points = sorted(
        (row.micro_batch_size, float(getattr(row, part).value))
        for row in rows
        if row.activation_checkpointing == checkpointing
    )
    size = recipe.training.sequences_of(s.micro_batch_size)
    if not points:
        return None
    if len(points) == 1:
        return points[0][1] * size / points[0][0]
    above = next((i for i, (x, _) in enumerate(points) if x >= size), len(points) - 1)
    (x0, y0), (x1, y1) = points[max(0, above - 1)], points[max(1, above)]
    return max(0.0, y0 + (y1 - y0) * (size - x0) / (x1 - x0))


ZERO3_FORWARD_HOOK_SHARE = 0.4
"""Gives the forward hooks' share of ZeRO-3's overhead of a layer; recomputation runs them once
more. Measured on a CPU with full recomputation: 2.2 ms more a layer than without ZeRO, where
ZeRO-3 adds 5.6 ms to both passes."""


def host_overhead_seconds(recipe: Recipe, graph: ModelGraph, s: Layout, otherwise: float) -> float:
    """Return a micro-batch's seconds on a rank beyond its layers.

    otherwise: the seconds where nothing was measured
    """
    own = engine_overheads(recipe, graph, s)
    if own is None:
        return otherwise
    layers = sum(layer.kind == "decoder" for layer in graph.layers) / s.pipeline
    choice, recomputed = s.activation_checkpointing, 0.0
    if isinstance(choice, PartialCheckpointing):
        recomputed = min(layers, choice.full)
    elif choice == "full":
        recomputed = layers
    hooked = layers + ZERO3_FORWARD_HOOK_SHARE * recomputed * (s.zero_stage == 3)
    return own.micro_batch_seconds.value + hooked * own.layer_seconds.value


def engine_overheads(recipe: Recipe, graph: ModelGraph, s: Layout) -> EngineMeasurement | None:
    """Return the measured overheads of the ZeRO stage.

    A pipeline uses those of ZeRO-1, the nearest engine that one process can run.
    """
    found = calibration_for(recipe, graph)
    return (
        None
        if found is None
        else next((row for row in found.engine if row.zero_stage == s.zero_stage), None)
    )


def measured_run_of(recipe: Recipe, graph: ModelGraph, s: Layout) -> RunMeasurement | None:
    """Return the measured run of this very layout, or None."""
    found, pins = calibration_for(recipe, graph), s.pins()
    return (
        None if found is None else next((run for run in found.runs if dict(run.pins) == pins), None)
    )


def measured_over_predicted(recipe: Recipe, graph: ModelGraph, s: Layout) -> float:
    """Return measured over predicted seconds: of this layout's run, else the median of all runs, or
    1.

    The median compares layouts with and without a run on equal terms.
    """
    found = calibration_for(recipe, graph)
    if found is None or not found.runs:
        return 1.0
    own = measured_run_of(recipe, graph, s)
    return own.factor if own is not None else statistics.median(run.factor for run in found.runs)


def scale_time(time: Time, factor: float) -> Time:
    """Scale every duration by the factor, and every rate by its inverse."""
    if factor == 1:
        return time
    seconds = {
        f.name: getattr(time, f.name) * factor
        for f in dataclasses.fields(time)
        if f.name.endswith("_seconds")
    }
    rates = ("tokens_per_second_per_gpu", "model_tflops_per_gpu", "hardware_tflops_per_gpu", "mfu")
    return dataclasses.replace(
        time, **seconds, **{name: getattr(time, name) / factor for name in rates}
    )


def ranks_per_core(recipe: Recipe, cluster: Cluster) -> float:
    """Return the ranks of a CPU node for each of its cores, at least 1, as far as cores were
    counted."""
    measured = recipe.cluster.measured
    if measured is None or not cluster.gpu.is_cpu:
        return 1.0
    return max(1.0, cluster.gpus_per_node / measured.found.machine.cores)


def shared_cores_step_seconds(
    recipe: Recipe,
    cluster: Cluster,
    alone_seconds: float,
    computing_seconds: Sequence[float],
    reducing_seconds: Sequence[float],
) -> float:
    """Return the step of ranks that share cores.

    The step is no shorter than on cores of its own, and no shorter than all ranks' computing on the
    cores there are. Collectives were timed with shared cores. A pipeline's messages overlap with
    another rank's computing.

    computing_seconds, reducing_seconds: by pipeline rank, each of which has equally many ranks
    """
    share = ranks_per_core(recipe, cluster)
    if share == 1:
        return alone_seconds
    ranks = len(computing_seconds)
    return max(alone_seconds, (share * sum(computing_seconds) + sum(reducing_seconds)) / ranks)

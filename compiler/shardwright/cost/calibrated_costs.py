"""What `cluster.measured` puts in the place of the cost model's own figures.

Constants count for every model. Layers, the engine's own time and runs count for the model, the
sequence length and the engine that they were measured with; elsewhere the formulas stand.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Literal

from shardwright.cluster.gpu_catalogue import Cluster
from shardwright.cost.cost_constants import Constants, default_constants
from shardwright.diagnostics import Diagnostic, Refusal
from shardwright.layout.layout import Layout
from shardwright.layout.layout_estimate import Time
from shardwright.models.model_graph import ModelGraph
from shardwright.recipe.literal_types import Checkpointing, PartialCheckpointing
from shardwright.recipe.measurements import (
    EngineMeasurement,
    LayerMeasurement,
    Measurements,
    RunMeasurement,
)
from shardwright.recipe.recipe_types import Recipe

KEY = ("cluster", "measured")
Part = Literal["forward_seconds", "backward_seconds", "kept_bytes"]


def calibrated_constants(recipe: Recipe) -> Constants:
    """The model's own, with the measured ones in their place. Raises Refusal as
    check_calibration."""
    measured = recipe.cluster.measured
    if measured is None:
        return default_constants()
    check_calibration(recipe)
    return dataclasses.replace(
        default_constants(), **{n: f.value for n, f in measured.found.constants.items()}
    )


def calibration_errors(recipe: Recipe) -> tuple[Diagnostic, ...]:
    """SW1303: measurements that cannot stand for this recipe's machines."""
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
        wrong.append(f"by another version: this one has no constant {strange[0]}")
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
    """Raises Refusal: SW1303."""
    if wrong := calibration_errors(recipe):
        raise Refusal(*wrong, source=recipe.source)


def calibration_for(recipe: Recipe, graph: ModelGraph) -> Measurements | None:
    """Those that speak of this very model; None where there are none."""
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
    """Forward, backward and what is run again of one micro-batch through the layer at this place.
    counted: the same by the formulas, which stand where nothing was measured of the layer at this
    tensor degree."""
    forward = _measured(recipe, graph, s, place, "none", "forward_seconds")
    backward = _measured(recipe, graph, s, place, "none", "backward_seconds")
    if forward is None or backward is None:
        return counted
    whole = _measured(recipe, graph, s, place, s.checkpointing, "backward_seconds")
    if whole is not None:
        return forward, backward, max(0.0, whole - backward)
    return forward, backward, counted[2] * forward / counted[0] if counted[0] else counted[2]


def measured_activation_bytes(
    recipe: Recipe, graph: ModelGraph, s: Layout, place: int, checkpointing: Checkpointing
) -> float | None:
    """What a decoder layer keeps of one micro-batch on a rank; None where nothing was measured of
    it."""
    return _measured(recipe, graph, s, place, checkpointing, "kept_bytes")


def representative_layers(kind_of: Sequence[int]) -> tuple[int, ...]:
    """kind_of: as ModelShapes has it. For each layer the place whose figures are its own too."""
    first: dict[int, int] = {}
    return tuple(
        first.setdefault(kind, place) if kind >= 0 else place for place, kind in enumerate(kind_of)
    )


def _measured(
    recipe: Recipe, graph: ModelGraph, s: Layout, place: int, checkpointing: str, part: Part
) -> float | None:
    """Between two measured micro-batches and beyond them on a straight line."""
    found = calibration_for(recipe, graph)
    if found is None or s.sequence_parallel or s.expert > 1 or s.context > 1:
        return None
    rows = [row for row in found.layers if row.place == place and row.tensor == s.tensor]
    rows = [row for row in rows if row.activation_checkpointing == checkpointing]
    return _between(rows, s.micro_batch_size, part) if rows else None


def _between(rows: Sequence[LayerMeasurement], micro_batch: int, part: Part) -> float:
    points = sorted((row.micro_batch_size, float(getattr(row, part).value)) for row in rows)
    if len(points) == 1:
        return points[0][1] * micro_batch / points[0][0]
    above = next((i for i, (size, _) in enumerate(points) if size >= micro_batch), len(points) - 1)
    (x0, y0), (x1, y1) = points[max(0, above - 1)], points[max(1, above)]
    return max(0.0, y0 + (y1 - y0) * (micro_batch - x0) / (x1 - x0))


ZERO3_FORWARD_HOOK_SHARE = 0.4
"""Of what ZeRO-3 adds to a layer: its modules' hooks of the forward pass, which a repeated pass has
once more. Measured on a CPU with full recomputation: 2.2 ms more a layer than without ZeRO, where
ZeRO-3 adds 5.6 ms to both passes."""


def host_overhead_seconds(recipe: Recipe, graph: ModelGraph, s: Layout, otherwise: float) -> float:
    """What a micro-batch costs on a rank beyond its layers."""
    own = engine_overheads(recipe, graph, s)
    if own is None:
        return otherwise
    layers = sum(layer.kind == "decoder" for layer in graph.layers) / s.pipeline
    choice, again = s.activation_checkpointing, 0.0
    if isinstance(choice, PartialCheckpointing):
        again = min(layers, choice.full)
    elif choice == "full":
        again = layers
    hooked = layers + ZERO3_FORWARD_HOOK_SHARE * again * (s.zero_stage == 3)
    return own.micro_batch_seconds.value + hooked * own.layer_seconds.value


def engine_overheads(recipe: Recipe, graph: ModelGraph, s: Layout) -> EngineMeasurement | None:
    """Of the ZeRO stage; a pipeline's are of ZeRO-1's engine, the nearest that one process can
    run."""
    found = calibration_for(recipe, graph)
    return (
        None
        if found is None
        else next((row for row in found.engine if row.zero_stage == s.zero_stage), None)
    )


def measured_run_of(recipe: Recipe, graph: ModelGraph, s: Layout) -> RunMeasurement | None:
    """The run of this very layout."""
    found, pins = calibration_for(recipe, graph), s.pins()
    return (
        None if found is None else next((run for run in found.runs if dict(run.pins) == pins), None)
    )


def measured_over_predicted(recipe: Recipe, graph: ModelGraph, s: Layout) -> float:
    """Measured over predicted: the layout's own where it ran, else the median of those that ran, so
    that a layout that ran is compared with one that did not on equal terms. 1 where none ran."""
    found = calibration_for(recipe, graph)
    if found is None or not found.runs:
        return 1.0
    own = measured_run_of(recipe, graph, s)
    return own.factor if own is not None else statistics.median(run.factor for run in found.runs)


def scale_time(time: Time, factor: float) -> Time:
    """Every second of it, and what is a rate the other way round."""
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
    """Above 1 where the ranks of a CPU's node share its cores, as far as anybody has counted
    these."""
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
    """A step of ranks that share cores: as long as on cores of their own, and no shorter than the
    computing of all of them on as many cores as there are, with the collectives, which were timed
    with the cores shared.

    The sequences: of each pipeline rank, of which there are equally many of each. A pipeline's
    messages hide: another rank computes.
    """
    share = ranks_per_core(recipe, cluster)
    if share == 1:
        return alone_seconds
    ranks = len(computing_seconds)
    return max(alone_seconds, (share * sum(computing_seconds) + sum(reducing_seconds)) / ranks)

"""Files of measurements, and recipes that name them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardwright.layout.planning_problem import Problem
from shardwright.recipe.measurements import (
    EngineMeasurement,
    LayerMeasurement,
    MeasuredMachine,
    MeasuredValue,
    Measurements,
    MeasurementsFile,
    RunMeasurement,
)
from shardwright.recipe.recipe_types import Recipe
from tests.unit.models.factory import SMALL_LLAMA, graph_of, problem_of, recipe_of

CPU = {"nodes": 1, "gpus_per_node": 2, "gpu": "cpu"}


def figure(value: float, n: int = 5, spread: float = 0.02) -> MeasuredValue:
    return MeasuredValue(value=value, n=n, spread=spread)


def measurements(**changes: Any) -> Measurements:
    plain: dict[str, Any] = {
        "kind": "shardwright measurements",
        "version": 1,
        "machine": MeasuredMachine(
            device="a CPU",
            is_cpu=True,
            cores=2,
            nodes=1,
            ranks=2,
            threads=1,
            precision="fp32",
            versions={},
        ),
        "model": graph_of(SMALL_LLAMA).config_hash,
        "target": "deepspeed",
        "sequence_length": 128,
        "constants": {"memory_efficiency": figure(0.5)},
        **dict.fromkeys(("layers", "engine", "samples", "runs"), ()),
    }
    return Measurements(**{**plain, **changes})


def layer(
    place: int, micro_batch: int, forward: float, *, checkpointing: str = "none", tensor: int = 1
) -> LayerMeasurement:
    return LayerMeasurement(
        place=place,
        tensor=tensor,
        micro_batch_size=micro_batch,
        activation_checkpointing=checkpointing,  # type: ignore[arg-type]
        forward_seconds=figure(forward),
        backward_seconds=figure(2 * forward if checkpointing == "none" else 3 * forward),
        kept_bytes=figure(1000.0 * micro_batch),
    )


def engine(
    zero_stage: int, *, micro_batch: float = 0.0, layer: float = 0.0, step: float = 0.0
) -> EngineMeasurement:
    return EngineMeasurement(
        zero_stage=zero_stage,
        micro_batch_seconds=figure(micro_batch),
        layer_seconds=figure(layer),
        step_seconds=figure(step),
        parameter_seconds=figure(0.0),
    )


def ran(pins: dict[str, Any], measured: float, predicted: float) -> RunMeasurement:
    return RunMeasurement(
        pins=pins, step_seconds=figure(measured), predicted_step_seconds=predicted, peak_bytes=10**9
    )


def named(found: Measurements) -> MeasurementsFile:
    content = json.dumps(asdict(found)).encode()
    import hashlib

    return MeasurementsFile(
        path="/measured.json",
        sha256=hashlib.sha256(content).hexdigest(),
        content=content,
        found=found,
    )


def problem(found: Measurements | None, gpus: int = 2, **changes: Any) -> Problem:
    training = {"precision": "fp32", **changes.pop("training", {})}
    measured = None if found is None else named(found)
    recipe: Recipe = recipe_of(
        cluster={**CPU, "gpus_per_node": gpus, "measured": measured}, training=training, **changes
    )
    return problem_of(recipe, graph_of(SMALL_LLAMA))


def write(path: Path, found: Measurements, **changes: Any) -> Path:
    path.write_text(json.dumps({**asdict(found), **changes}))
    return path

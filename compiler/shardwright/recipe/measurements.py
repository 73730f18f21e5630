"""Defines the file that `cluster.measured` names: figures measured on the machine itself, each with
its repeats and spread.

The file is the record `Measurements` as JSON, field by field. `calibrate` writes all fields but
`runs`, which `tune` adds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from shardwright.recipe.literal_types import Checkpointing, Precision
from shardwright.utils.json_values import JsonObject

KIND: Literal["shardwright measurements"] = "shardwright measurements"
VERSION: Literal[1] = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredValue:
    """Holds a measured value in the unit that its field's name ends with. n: repeats. spread: their
    interquartile range over their median."""

    value: float
    n: int
    spread: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMachine:
    """Describes the machine. cores: cores per node that ranks may use. ranks: processes that
    measured, on `nodes` nodes. threads: per process."""

    device: str
    is_cpu: bool
    cores: int
    nodes: int
    ranks: int
    threads: int
    precision: Precision
    versions: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingSample:
    """Holds one timing that the constants are fitted to. sizes: such as m, n, k of a matrix
    product."""

    what: str
    sizes: Mapping[str, int]
    seconds: MeasuredValue


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMeasurement:
    """Holds the times of one layer of the model on one rank, without its collectives.

    place: index in graph.layers of the first layer of its kind. backward_seconds: with
    recomputation. kept_bytes: activations saved for the backward pass.
    """

    place: int
    tensor: int
    micro_batch_size: int
    activation_checkpointing: Checkpointing
    forward_seconds: MeasuredValue
    backward_seconds: MeasuredValue
    kept_bytes: MeasuredValue


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMeasurement:
    """Holds the engine's overhead on one rank: per micro-batch, per decoder layer of a micro-batch,
    per step, and per parameter that a step updates."""

    zero_stage: int
    micro_batch_seconds: MeasuredValue
    layer_seconds: MeasuredValue
    step_seconds: MeasuredValue
    parameter_seconds: MeasuredValue


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMeasurement:
    """Holds the measurement of a layout that ran.

    pins: its `parallelism` keys. predicted_step_seconds: the cost model's prediction at that time,
    without calibration. peak_bytes: on the peak-memory rank; None where it was not recorded.
    """

    pins: JsonObject
    step_seconds: MeasuredValue
    predicted_step_seconds: float
    peak_bytes: int | None

    @property
    def factor(self) -> float:
        """Return the measured over the predicted step time."""
        return self.step_seconds.value / self.predicted_step_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """Holds all measurements of a machine.

    model: the `config_hash` (models/model_graph.py) that layers and runs are valid for, at this
    sequence length and engine. constants: by their names in cost/constants.json.
    """

    kind: Literal["shardwright measurements"]
    version: Literal[1]
    machine: MeasuredMachine
    model: str
    target: str
    sequence_length: int
    constants: Mapping[str, MeasuredValue]
    layers: tuple[LayerMeasurement, ...]
    engine: tuple[EngineMeasurement, ...]
    samples: tuple[TimingSample, ...]
    runs: tuple[RunMeasurement, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementsFile:
    """Holds a measurements file as it was read. path: absolute. sha256: of `content`."""

    path: str
    sha256: str
    content: bytes
    found: Measurements


MEASURED_FILE = "measured.json"
"""Names the copy of `cluster.measured` in a compiled folder; recipe.resolved.json refers to it."""

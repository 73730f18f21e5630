"""What `cluster.measured` names: figures that were measured on the machine itself, each with how
often and how evenly.

The file is the record `Measurements` as JSON, field by field. `calibrate` writes all but `runs`,
`tune` adds those.
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
    """value: in the unit that its name ends with. n: repeats behind it. spread: the distance of
    their quartiles over their median."""

    value: float
    n: int
    spread: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMachine:
    """Where it was measured. cores: that a node's ranks may use. ranks: processes that measured, on
    `nodes` nodes. threads: of each process."""

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
    """One thing that was timed, for the reader: the constants are fitted to these. sizes: what was
    timed, such as m, n, k of a product."""

    what: str
    sizes: Mapping[str, int]
    seconds: MeasuredValue


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMeasurement:
    """One real layer of the model on one rank, without its collectives. place: in graph.layers, of
    the first of its kind. backward_seconds: with what the checkpointing runs again. kept_bytes: for
    the backward pass."""

    place: int
    tensor: int
    micro_batch_size: int
    activation_checkpointing: Checkpointing
    forward_seconds: MeasuredValue
    backward_seconds: MeasuredValue
    kept_bytes: MeasuredValue


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMeasurement:
    """What the engine adds on one rank: to a micro-batch, to each decoder layer of it, to a step,
    and to a step for each parameter that is updated."""

    zero_stage: int
    micro_batch_seconds: MeasuredValue
    layer_seconds: MeasuredValue
    step_seconds: MeasuredValue
    parameter_seconds: MeasuredValue


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMeasurement:
    """A layout that ran. pins: its keys, as `parallelism` has them. predicted_step_seconds: by the
    cost model alone, as it was then. peak_bytes: of the fullest rank; None where it was not
    told."""

    pins: JsonObject
    step_seconds: MeasuredValue
    predicted_step_seconds: float
    peak_bytes: int | None

    @property
    def factor(self) -> float:
        """Measured over predicted."""
        return self.step_seconds.value / self.predicted_step_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """model: the model's `config_hash` (models/model_graph.py); layers and runs speak of it alone,
    at this sequence length and for this engine. constants: by their names in
    cost/constants.json."""

    kind: Literal["shardwright measurements"]
    version: Literal[1]
    machine: MeasuredMachine
    model: str
    target: str
    sequence_length: int
    constants: Mapping[str, MeasuredValue]
    layers: tuple[LayerMeasurement, ...] = ()
    engine: tuple[EngineMeasurement, ...] = ()
    samples: tuple[TimingSample, ...] = ()
    runs: tuple[RunMeasurement, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementsFile:
    """path: absolute. content: the file's bytes, as they were when they were read. sha256: of
    these."""

    path: str
    sha256: str
    content: bytes
    found: Measurements


MEASURED_FILE = "measured.json"
"""The copy of `cluster.measured`, which recipe.resolved.json names."""

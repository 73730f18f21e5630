"""Define what a layout is predicted to cost: the objects of `estimate --json`, field by field."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.diagnostics import Diagnostic
from shardwright.layout.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Give the bytes on the peak-memory device of one pipeline rank; peak is the sum of the
    rest."""

    stage: int
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    workspace_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Give the peak memory of a layout, and whether it fits."""

    peak_bytes: int
    capacity_bytes: int
    fits: bool
    stages: tuple[StageMemory, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Time:
    """Split a step into exposed times: compute + *_comm + optimizer + bubble = step, within 1e-6.

    tensor_comm_seconds: collectives that layers wait for, of tensor, context and expert ranks
    outer_comm_seconds: a step's share of the exposed communication of DiLoCo's outer step
    """

    step_seconds: float
    compute_seconds: float
    tensor_comm_seconds: float
    pipeline_comm_seconds: float
    data_comm_seconds: float
    optimizer_seconds: float
    bubble_seconds: float
    bubble_fraction: float
    tokens_per_second_per_gpu: float
    model_tflops_per_gpu: float
    hardware_tflops_per_gpu: float
    mfu: float
    outer_comm_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Give the whole training run: steps, days, GPU hours and cost (None without a price)."""

    steps: int
    days: float
    gpu_hours: float
    cost: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionError:
    """Give the half-widths (fractions) that hold 80 % of the measured runs of a regime.

    step_time, memory: None where no measured run is of this kind
    step_time_reason, memory_reason: the kind without measured runs ("a CPU"); "" where there is a
        figure
    step_time_regime, memory_regime: the regime's name and its number of runs
    """

    step_time: float | None
    memory: float | None
    step_time_reason: str
    memory_reason: str
    step_time_regime: str = ""
    memory_regime: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Hold the predicted cost of one layout.

    boundaries: stage s holds graph.layers[boundaries[s]:boundaries[s+1]]
    error: how far such predictions were off where they could be compared with measurements
    flops_source: how the layers' FLOPs were found, see Layer; names the reason where tracing failed
    """

    strategy: Layout
    boundaries: tuple[int, ...]
    feasible: bool
    diagnostics: tuple[Diagnostic, ...]
    memory: Memory
    time: Time
    training: Training
    error: PredictionError
    flops_source: str

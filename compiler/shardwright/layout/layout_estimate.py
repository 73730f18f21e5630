"""What a layout is predicted to cost: the objects of `estimate --json`, field by field."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.diagnostics import Diagnostic
from shardwright.layout.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes on the fullest rank of one pipeline rank's devices. peak = sum of the parts."""

    stage: int
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    workspace_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    peak_bytes: int
    capacity_bytes: int
    fits: bool
    stages: tuple[StageMemory, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Time:
    """compute + tensor_comm + pipeline_comm + data_comm + outer_comm + optimizer + bubble = step,
    within 1e-6 relative.

    tensor_comm: collectives that layers wait for, of tensor, context and expert ranks. outer_comm:
    a step's share of what training waits for in an outer step between islands.
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
    steps: int
    days: float
    gpu_hours: float
    cost: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionError:
    """Half-widths as shares that hold 80 % of the measured runs of a regime, None where no run is
    of this kind; the reason says what kind that is ("a CPU"), and is "" where there is a figure.
    regime: its name and its runs' number.
    """

    step_time: float | None
    memory: float | None
    step_time_reason: str
    memory_reason: str
    step_time_regime: str = ""
    memory_regime: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """boundaries: stage s holds graph.layers[boundaries[s]:boundaries[s+1]]. error: how far such
    predictions were off where they could be compared. flops_source: of the model's layers, see
    Layer; one that could not be traced says why."""

    strategy: Layout
    boundaries: tuple[int, ...]
    feasible: bool
    diagnostics: tuple[Diagnostic, ...]
    memory: Memory
    time: Time
    training: Training
    error: PredictionError
    flops_source: str

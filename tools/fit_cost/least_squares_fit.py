"""Fits the cost model's constants to the published rows: robust least squares on log error, held to
physical priors.

Levenberg-Marquardt on the logarithms of the constants (all are positive); derivatives by
differences.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from shardwright.cost.cost_constants import Constants, constant_entries
from shardwright.cost.priced_layout import build_priced_layout, with_boundaries
from shardwright.cost.step_time import estimate_time
from shardwright.layout.layout import Layout
from shardwright.search.layout_resolution import with_stages_assigned
from tools.fit_cost import score, score_engines
from tools.fit_cost.published_runs import (
    Case,
    Row,
    estimate,
    is_engine_row,
    is_megatron,
    live_bytes,
    resolved_layout,
)

# A published figure scatters this much between runs (its logarithm); larger errors count less and
# less (Cauchy).
NOISE = 0.04
MEMORY_NOISE = 0.05
# What a layout that ran may exceed the device by, and one that ran out of memory miss it by (these
# are rare, and a plan that dies costs more than one that is refused).
RAN_NOISE = 0.03
OUT_OF_MEMORY_NOISE = 0.005
BOUND_MARGIN = 0.01
MEMORY_CONSTANTS = (
    "context_bytes",
    "communicator_bytes",
    "fragmentation",
    "backward_share",
    "logit_bytes_megatron",
)
MOST_STEPS = 40
NUDGE = 1e-3
MOST_STEP = 0.5
"""Of a logarithm: for a derivative, and in one step."""


def time_target(case: Case) -> float | None:
    """Measured seconds of a step; where a source gives TFLOP/s alone (Megatron SC'21, Table 2),
    from its own formula.

    Left out of the fit, never of the scoring: that table's ZeRO-3 rows. They took 65 s for 174B on
    768 and on 1536 GPUs alike, which is one adapter's traffic for a node of eight: DeepSpeed of
    2021, before its gathers were coalesced.
    """
    row = case.row
    if row["measured"]["oom"]:
        return None
    if is_engine_row(row):
        return _engine_target(row)
    seconds: float | None = score.step_seconds(row)
    rate = row["measured"]["tflops_per_gpu"]
    if seconds or not rate or row["parallel"]["zero_stage"] == 3:
        return seconds
    m, batch = row["model"], row["parallel"]["global_batch"]
    length, hidden, layers, vocabulary = m["seq_len"], m["hidden"], m["layers"], m["vocab"]
    correction = 1 + length / (6 * hidden) + vocabulary / (16 * layers * hidden)
    flops = (
        96 * batch * length * layers * hidden**2 * correction
    )  # arXiv 2104.04473, with full recomputation
    return float(flops / (rate * 1e12 * case.cluster.world_size))


def _engine_target(row: Row) -> float | None:
    """Left out of the fit, never of the scoring: InternEvo between nodes (its links are the RoCE
    curve's source, and its hierarchical ZeRO is asked as ZeRO-1), and two of three of nanotron's
    rows, for time."""
    engine, nodes = row["engine"], row["hardware"]["nodes"]
    number = row["id"].rpartition("-")[2]
    if (engine == "InternEvo" and nodes > 1) or (engine == "nanotron" and int(number) % 3):
        return None
    seconds: float | None = score_engines.seconds(row)
    return seconds


def memory_target(case: Case) -> float | None:
    """Measured peak in bytes. Left out of the fit: Korthikanti's figure 1, which is analytic."""
    row = case.row
    if is_engine_row(row):
        return None  # what an allocator reserved, without the context, or nobody says which
    if (
        row["measured"]["oom"]
        or row["id"].startswith("korth-mem")
        or not row["measured"]["peak_mem_GB"]
    ):
        return None
    return float(row["measured"]["peak_mem_GB"]) * 1e9


def as_megatron_run(case: Case) -> Case:
    """Megatron-LM's own runs as such."""
    if is_engine_row(case.row) or not is_megatron(case.row):
        return case
    return dataclasses.replace(case, recipe=dataclasses.replace(case.recipe, target="megatron"))


def time_residuals(cases: Sequence[Case], c: Constants) -> list[float]:
    targets = [(as_megatron_run(case), target) for case in cases if (target := time_target(case))]
    weight = _weights([case for case, _ in targets])
    return [
        weight[case.project] * _robust(math.log(step_seconds(case, c) / target) / NOISE)
        for case, target in targets
    ]


def step_seconds(case: Case, c: Constants) -> float:
    """With the layers placed as the constants of the package place them, which a fit hardly
    changes."""
    problem = case.problem
    strategy, boundaries = _placed(case)
    return estimate_time(
        with_boundaries(build_priced_layout(problem, strategy, case.constants(c)), boundaries)
    ).step_seconds


def _placed(case: Case) -> tuple[Layout, tuple[int, ...]]:
    key = case.row["id"]
    if key not in _PLACED:
        layout = resolved_layout(case)
        _PLACED[key] = layout.strategy, layout.boundaries
    return _PLACED[key]


_PLACED: dict[str, tuple[Layout, tuple[int, ...]]] = {}


def memory_residuals(cases: Sequence[Case], c: Constants) -> list[float]:
    cases = [case for case in cases if not is_engine_row(case.row)]
    weight = _weights(cases)
    found: list[float] = []
    for case in cases:
        memory = estimate(case, c).memory
        target = memory_target(case)
        if target:
            error = math.log(memory.peak_bytes / target)
        elif case.row["id"].startswith("korth-mem"):
            continue
        else:
            # That it ran, or did not, is certain: no robust loss. The allocator's slack decides
            # nothing.
            usable = memory.capacity_bytes * (1 - c.driver_share)
            layout = with_stages_assigned(case.problem, case.strategy, c)
            over = math.log(live_bytes(layout) / usable)
            ran = not case.row["measured"]["oom"]
            error = (
                max(0.0, over) / RAN_NOISE
                if ran
                else min(0.0, over - BOUND_MARGIN) / OUT_OF_MEMORY_NOISE
            )
            found.append(weight[case.project] * error)
            continue
        found.append(weight[case.project] * _robust(error / MEMORY_NOISE))
    return found


def _weights(cases: Sequence[Case]) -> dict[str, float]:
    """A project with many rows outweighs one with few, but by the root of their number alone."""
    return {
        project: count**-0.25 for project, count in Counter(case.project for case in cases).items()
    }


def _robust(x: float) -> float:
    """Cauchy's loss as a residual: its square is log(1 + x^2)."""
    return math.copysign(math.sqrt(math.log1p(x * x)), x)


def fitted_names(*, memory: bool) -> tuple[str, ...]:
    return tuple(
        name
        for name, entry in constant_entries().items()
        if entry["prior_spread"] > 0 and (name in MEMORY_CONSTANTS) == memory
    )


def priors() -> Constants:
    """The constants before any row is seen."""
    return Constants(**{name: entry["prior"] for name, entry in constant_entries().items()})


def fit(cases: Sequence[Case], c: Constants) -> Constants:
    """Constants for these rows, from these: those of time, then those of memory (they share
    none)."""
    c = _fit(fitted_names(memory=False), c, lambda x: time_residuals(cases, x))
    return _fit(fitted_names(memory=True), c, lambda x: memory_residuals(cases, x))


class LinearizedFit:
    """The fit of all cases linearised where it ends, so that cases can be left out of it in no
    time: one step of Gauss and Newton without theirs. What only they determined goes back to its
    prior, as a fit without them has it."""

    def __init__(self, cases: Sequence[Case], c: Constants) -> None:
        self.c = c
        self._parts = [
            _Linear.of(names, c, cases, residuals)
            for names, residuals in (
                (fitted_names(memory=False), time_residuals),
                (fitted_names(memory=True), memory_residuals),
            )
        ]

    def without(self, is_left_out: Callable[[Case], bool]) -> Constants:
        changed = [part.without(is_left_out) for part in self._parts]
        return dataclasses.replace(
            self.c, **{name: value for part in changed for name, value in part.items()}
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Linear:
    """Residuals (length rows), their derivatives by the constants' logarithms (rows, names) and
    whose they are."""

    names: tuple[str, ...]
    x: np.ndarray
    now: np.ndarray
    jacobian: np.ndarray
    whose: tuple[Case, ...]

    @classmethod
    def of(
        cls,
        names: tuple[str, ...],
        c: Constants,
        cases: Sequence[Case],
        residuals: Callable[[Sequence[Case], Constants], list[float]],
    ) -> _Linear:
        x = np.log([getattr(c, n) for n in names])
        whose = tuple(case for case in cases if has_residual(case, residuals is memory_residuals))

        def at(y: np.ndarray) -> np.ndarray:
            return np.array(
                residuals(cases, dataclasses.replace(c, **dict(zip(names, np.exp(y), strict=True))))
            )

        now = at(x)
        assert len(now) == len(whose)
        nudges = np.eye(len(x)) * NUDGE
        jacobian = np.stack([(at(x + nudge) - now) / NUDGE for nudge in nudges], axis=1)
        return cls(names=names, x=x, now=now, jacobian=jacobian, whose=whose)

    def without(self, is_left_out: Callable[[Case], bool]) -> dict[str, float]:
        entries = constant_entries()
        priors_ = np.log([entries[n]["prior"] for n in self.names])
        spreads = np.array([entries[n]["prior_spread"] for n in self.names])
        kept = np.array([not is_left_out(case) for case in self.whose])
        rows, now = self.jacobian[kept], self.now[kept]
        normal = rows.T @ rows + np.diag(1 / spreads**2)
        gradient = rows.T @ now + (self.x - priors_) / spreads**2
        step = np.clip(np.linalg.solve(normal, -gradient), -MOST_STEP, MOST_STEP)
        return dict(zip(self.names, np.exp(self.x + step).tolist(), strict=True))


def has_residual(case: Case, memory: bool) -> bool:
    """Whether time_residuals, or memory_residuals, have one of the case."""
    if not memory:
        return bool(time_target(case))
    return not is_engine_row(case.row) and not (case.row["id"].startswith("korth-mem"))


def _fit(
    names: tuple[str, ...], c: Constants, residuals: Callable[[Constants], list[float]]
) -> Constants:
    entries = constant_entries()
    priors = np.log([entries[n]["prior"] for n in names])
    spreads = np.array([entries[n]["prior_spread"] for n in names])

    def constants(x: np.ndarray) -> Constants:
        return dataclasses.replace(c, **dict(zip(names, np.exp(x).tolist(), strict=True)))

    def every(x: np.ndarray) -> np.ndarray:
        return np.concatenate([residuals(constants(x)), (x - priors) / spreads])

    x = np.log([getattr(c, n) for n in names])
    now, damping = every(x), 1e-2
    for _ in range(MOST_STEPS):
        jacobian = np.empty((len(now), len(x)))
        for i in range(len(x)):
            nudged = x.copy()
            nudged[i] += NUDGE
            jacobian[:, i] = (every(nudged) - now) / NUDGE
        normal, gradient = jacobian.T @ jacobian, jacobian.T @ now
        gain = 0.0
        while damping < 1e8:
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-9), -gradient)
            trial = every(x + np.clip(step, -MOST_STEP, MOST_STEP))
            gain = float(now @ now - trial @ trial)
            if gain > 0:
                x, now, damping = x + np.clip(step, -MOST_STEP, MOST_STEP), trial, damping / 3
                break
            damping *= 4
        if gain < 1e-4 * float(now @ now):
            break
    return constants(x)

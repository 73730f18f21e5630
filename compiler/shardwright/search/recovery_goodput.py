"""Estimate what `run --supervise` with the recipe's `launch.recovery` makes of the goodput.

A lost node finds a spare host, or the run goes on with fewer nodes, or it waits for hands. Nodes
that are being repaired are Poisson distributed with the mean rho = N h T / M_node for N nodes, the
share h of failures that take a node away, and a repair of T: the stationary M/G/infinity queue,
whatever the distribution of T (L. Takacs, Introduction to the Theory of Queues, 1962). A failure
meets that distribution, because Poisson arrivals see time averages (R. W. Wolff, Operations
Research 30(2), 1982).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardwright.cost.goodput import (
    FailureModel,
    Goodput,
    expected_seconds,
    expected_seconds_with_copies,
    goodput_constants,
)
from shardwright.cost.layout_costs import SECONDS_PER_DAY
from shardwright.diagnostics import Diagnostic, Refusal
from shardwright.launch.launchers.launcher_table import resolve_launcher
from shardwright.layout.layout_estimate import Estimate
from shardwright.layout.planning_problem import Problem
from shardwright.recipe.recipe_types import ParallelismSection, RecoverySection
from shardwright.search.cluster_sizing import with_nodes
from shardwright.search.layout_search import choose_layout

MAX_FEWER_NODES = 4
"""Numbers of nodes, the largest first, whose layouts are searched."""
DEGREES = ("tensor", "pipeline", "data", "context", "expert", "micro_batch_size")
KEPT_PINS = (
    "zero_stage",
    "offload",
    "activation_checkpointing",
    "memory_headroom",
    "expert_tensor",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryGoodput:
    """Hold `recovery` of `plan --json`, `estimate --json` and `explain --json`.

    is_configured: the recipe has launch.recovery; else these are its defaults
    fewer_nodes: nodes -> seconds of a step of the best layout there, with the same global batch
    unplannable: nodes -> why there is none
    by_hand_share: lost nodes that find neither a spare host nor a plan for fewer nodes
    restart_seconds: mean, from a failure until training goes on; by_hand_seconds: without a
        supervisor
    fraction, expected_days: as Goodput has them, with `run --supervise`; fraction_by_hand: without
    fraction_with_a_spare: with one spare host more
    """

    is_configured: bool
    spares: int
    min_nodes: int
    fewer_nodes: Mapping[int, float]
    unplannable: Mapping[int, str]
    by_hand_share: float
    restart_seconds: float
    by_hand_seconds: float
    fraction: float
    fraction_by_hand: float
    fraction_with_a_spare: float
    expected_days: float | None


def recovery_goodput(
    problem: Problem, estimate: Estimate, expected: Goodput | None
) -> RecoveryGoodput | None:
    """Return the goodput under a supervisor; None where none starts the nodes (a scheduler,
    islands), or where the goodput is not known.

    expected: the goodput with restarts by hand
    """
    recipe, cluster = problem.recipe, problem.cluster
    launcher = resolve_launcher(recipe.launch, cluster.nodes)
    if expected is None or launcher.scheduler or launcher.by_hand or recipe.cluster.islands > 1:
        return None
    policy = recipe.launch.recovery or RecoverySection()
    fewest = cluster.nodes if policy.min_nodes is None else policy.min_nodes
    fewer: dict[int, float] = {}
    unplannable: dict[int, str] = {}
    for nodes, found in fewer_node_layouts(problem, fewest):
        if isinstance(found, Diagnostic):
            unplannable[nodes] = f"{found.code} {found.message}"
        else:
            fewer[nodes] = found.time.step_seconds
    steps, step_seconds = estimate.training.steps, estimate.time.step_seconds
    span = steps or expected.interval_steps or 0
    mtbf, constants = expected.cluster_mtbf_hours * 3600, goodput_constants()
    away = constants["lost_node_share"]
    rho = away * constants["node_repair_hours"] * 3600 / mtbf
    reading = expected.restart_seconds - constants["restart_seconds"]

    def spent(spares: int) -> tuple[float, float, float]:
        """Return (expected seconds, share by hand, mean restart)."""
        slower = [fewer[n] / step_seconds for n in _without_gap(fewer, cluster.nodes)]
        taken_over = spares + len(slower) if launcher.uses_hostfile else 0
        by_hand = 1 - _poisson_at_most(rho, taken_over - 1)
        quick = 1 - away * by_hand
        restart = reading + (
            quick * constants["supervised_restart_seconds"]
            + (1 - quick) * constants["restart_seconds"]
        )
        failures = FailureModel(
            mtbf_seconds=mtbf, save_seconds=expected.save_seconds, restart_seconds=restart
        )
        interval = expected.interval_steps or span
        seconds = expected_seconds(failures, step_seconds, span, interval)
        if expected.memory is not None:
            seconds = expected_seconds_with_copies(
                failures, step_seconds, span, interval, expected.memory
            )
        slowness = sum(
            _poisson(rho, spares + missing) * (1 - 1 / times)
            for missing, times in enumerate(slower, start=1)
        )
        return seconds.total / (1 - slowness), by_hand, restart

    total, by_hand, restart = spent(policy.spares)
    trained = span * step_seconds
    days = total / SECONDS_PER_DAY
    return RecoveryGoodput(
        is_configured=recipe.launch.recovery is not None,
        spares=policy.spares,
        min_nodes=fewest,
        fewer_nodes=fewer,
        unplannable=unplannable,
        by_hand_share=by_hand,
        restart_seconds=restart,
        by_hand_seconds=expected.restart_seconds,
        fraction=trained / total,
        fraction_by_hand=expected.fraction,
        fraction_with_a_spare=trained / spent(policy.spares + 1)[0],
        expected_days=days if steps and math.isfinite(days) else None,
    )


def fewer_node_layouts(
    problem: Problem, fewest: int
) -> Iterator[tuple[int, Estimate | Diagnostic]]:
    """Yield the best layout of each smaller number of nodes, or the first rule that forbids all,
    as a supervisor plans them (supervise/fewer_nodes.py)."""
    nodes = problem.cluster.nodes
    for count in range(nodes - 1, fewest - 1, -1)[:MAX_FEWER_NODES]:
        first: Diagnostic | None = None
        for parallelism in _parallelism_choices(problem.recipe.parallelism):
            recipe = dataclasses.replace(
                problem.recipe,
                parallelism=parallelism,
                training=dataclasses.replace(problem.recipe.training, days_at_most=None),
            )
            try:
                smaller = with_nodes(dataclasses.replace(problem, recipe=recipe), count)
                yield count, choose_layout(smaller)
                break
            except Refusal as refused:
                first = first or refused.diagnostics[0]
        else:
            assert first is not None
            yield count, first


def _parallelism_choices(pinned: ParallelismSection) -> Iterator[ParallelismSection]:
    """Yield the pins with data free, then no pinned degrees, then only keys that no degree
    contradicts."""
    yield dataclasses.replace(pinned, data=None)
    yield dataclasses.replace(pinned, **dict[str, Any].fromkeys(DEGREES))
    others = {f.name for f in dataclasses.fields(pinned)} - set(KEPT_PINS)
    yield dataclasses.replace(pinned, **dict[str, Any].fromkeys(others))


def _without_gap(fewer: Mapping[int, float], nodes: int) -> list[int]:
    """Return the numbers of nodes that one more lost node each leads to, down to the first that
    cannot be planned."""
    found = []
    while nodes - 1 in fewer:
        nodes -= 1
        found.append(nodes)
    return found


def _poisson(mean: float, count: int) -> float:
    return math.exp(-mean + count * math.log(mean) - math.lgamma(count + 1)) if mean else 0.0**count


def _poisson_at_most(mean: float, count: int) -> float:
    return sum(_poisson(mean, k) for k in range(count + 1))

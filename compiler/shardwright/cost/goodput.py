"""Estimate goodput: the share of the time that trains, and how often to save.

Failures of nodes are independent and memoryless, and each ends the run. The cluster's mean time
between failures M is a node's over the number of nodes. A failed run loses the steps since its last
save, and resumes R seconds later. Sources: J. W. Young, CACM 17(9), 1974; J. T. Daly, Future
Generation Computer Systems 22(3), 2006.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources

from shardwright.cost.cost_constants import default_constants
from shardwright.cost.layout_costs import SECONDS_PER_DAY
from shardwright.cost.priced_layout import PricedLayout, build_priced_layout, with_boundaries
from shardwright.diagnostics import refusal
from shardwright.layout.layout_estimate import Estimate
from shardwright.layout.optimizer_matrices import factor_elements, matrix_parameters
from shardwright.layout.optimizers import OPTIMIZERS
from shardwright.layout.planning_problem import Problem
from shardwright.layout.zero_settings import fits_in_host_memory, offloaded_bytes
from shardwright.models.model_graph import ModelGraph
from shardwright.models.trainable_parameters import frozen_parameter_names
from shardwright.utils.memoize import memoize


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureModel:
    """Describe failures.

    mtbf_seconds: M, mean time between failures of the whole cluster
    save_seconds: d, that training waits for a save
    restart_seconds: R, from a failure until training resumes from the last save
    """

    mtbf_seconds: float
    save_seconds: float
    restart_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedTime:
    """Split the expected seconds.

    lost: repeated work, and steps and saves that a failure interrupted
    """

    trained: float
    saves: float
    lost: float
    restarts: float

    @property
    def total(self) -> float:
        return self.trained + self.saves + self.lost + self.restarts


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCopyCost:
    """Hold what copies in host memory cost (`checkpoint.in_memory`).

    every_steps: steps between two of them
    node_gbytes: of one copy, that the node with most writes for itself and sends to its peer
    host_gbytes: that two copies take of that node's memory, its peer's parts included
    copy_seconds: that training waits for one; seconds_per_step: the same by step
    """

    every_steps: int
    node_gbytes: float
    host_gbytes: float
    copy_seconds: float
    seconds_per_step: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Hold the goodput object of `estimate --json`.

    checkpoint_gbytes: tensors of one checkpoint
    checkpoint_gbytes_per_second: write speed of each node
    speed_from: recipe, measured or default
    interval_steps: steps between two saves; None: only after the last step
    fraction: share of the time that trains
    auto_interval_steps, auto_expected_days: with `checkpoint.every_steps: auto`
    worth_of_half_the_save_days: what a save in half the time would shorten the training by, at its
        own best interval where the recipe says auto
    memory: what copies in host memory cost, None without them; with them a failure loses the steps
        since the last copy

    Days are None where the number of steps is unknown, or where they overflow.
    """

    node_mtbf_hours: float
    cluster_mtbf_hours: float
    checkpoint_gbytes: float
    checkpoint_gbytes_per_second: float
    speed_from: str
    save_seconds: float
    restart_seconds: float
    interval_steps: int | None
    fraction: float
    days_without_failures: float | None
    expected_days: float | None
    lost_to_saves_days: float | None
    lost_to_failures_days: float | None
    lost_to_restarts_days: float | None
    expected_failures: float | None
    worth_of_half_the_save_days: float | None
    auto_interval_steps: int
    auto_expected_days: float | None
    memory: MemoryCopyCost | None = None


COPIES_HELD = 2
"""Copies in memory at once: the last whole one, and the one that is being written."""


@functools.cache
def goodput_constants() -> dict[str, float]:
    """Return the values of goodput.json, by name."""
    text = resources.files("shardwright.cost").joinpath("goodput.json").read_text("utf-8")
    return {name: entry["value"] for name, entry in json.loads(text)["constants"].items()}


def young_daly_seconds(d: FailureModel) -> float:
    """Return the work between two saves that minimizes the expected time, by Daly's higher-order
    estimate.

    Its first term is Young's: sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + d / 18M) - d for d < 2M, else M.
    """
    if d.save_seconds >= 2 * d.mtbf_seconds:
        return d.mtbf_seconds
    root = math.sqrt(d.save_seconds / (2 * d.mtbf_seconds))
    return (
        math.sqrt(2 * d.save_seconds * d.mtbf_seconds) * (1 + root / 3 + root**2 / 9)
        - d.save_seconds
    )


def auto_interval(d: FailureModel, step_seconds: float, steps: int) -> int:
    """Return the steps of `checkpoint.every_steps: auto`: at least one, at most all.

    steps: 0 where unknown
    """
    interval = max(1, round(young_daly_seconds(d) / step_seconds))
    return min(interval, steps) if steps else interval


def expected_seconds(
    d: FailureModel, step_seconds: float, steps: int, interval: int
) -> ExpectedTime:
    """Return the expected time of a training with a save every `interval` steps, and after the last
    one.

    A stretch of w seconds (steps and their save) takes M (e^(w/M) - 1) with its interruptions, and
    e^(w/M) - 1 restarts. Failures prolong each restart to M (e^(R/M) - 1): Daly's complete model.
    The result is infinite where e^(w/M) overflows.
    """
    whole, rest = divmod(steps, interval)
    mtbf = d.mtbf_seconds
    stretches = [(whole, interval), (1 if rest else 0, rest)]
    lost = restarts = 0.0
    for count, length in stretches:
        if count:
            seconds = length * step_seconds + d.save_seconds
            failures = _expm1(seconds / mtbf)
            lost += count * max(0.0, mtbf * failures - seconds)
            restarts += count * failures * mtbf * _expm1(d.restart_seconds / mtbf)
    saves = sum(count for count, _ in stretches) * d.save_seconds
    return ExpectedTime(trained=steps * step_seconds, saves=saves, lost=lost, restarts=restarts)


def _expm1(exponent: float) -> float:
    try:
        return math.expm1(exponent)
    except OverflowError:
        return math.inf


def goodput(
    problem: Problem, estimate: Estimate, *, measured: float | None = None
) -> Goodput | None:
    """Estimate the goodput of a recipe's chosen layout.

    Returns None where neither the steps nor every_steps is known, and where nothing is trained.

    measured: GB/s of each node, from a run's own saves
    """
    if problem.recipe.forward_only:
        return None
    checkpoint = problem.recipe.checkpoint
    disturbances, files, speed = _disturbances(problem, estimate, measured)
    steps, step_seconds = estimate.training.steps, estimate.time.step_seconds
    auto = auto_interval(disturbances, step_seconds, steps)
    interval = auto if checkpoint.every_steps == "auto" else checkpoint.every_steps
    span = steps or interval or 0
    if not span:
        return None
    faster = FailureModel(
        mtbf_seconds=disturbances.mtbf_seconds,
        save_seconds=disturbances.save_seconds / 2,
        restart_seconds=disturbances.restart_seconds,
    )
    at_half = (
        auto_interval(faster, step_seconds, steps) if checkpoint.every_steps == "auto" else interval
    )
    memory = memory_copy_cost(problem, estimate) if checkpoint.in_memory else None
    if memory is not None:  # no checkpoint is read
        restart = goodput_constants()["restart_seconds"] + memory.copy_seconds
        disturbances = dataclasses.replace(disturbances, restart_seconds=restart)
        faster = dataclasses.replace(faster, restart_seconds=restart)
    spent, best, half = (
        expected_seconds(d, step_seconds, span, every or span)
        if memory is None
        else expected_seconds_with_copies(d, step_seconds, span, every or span, memory)
        for d, every in ((disturbances, interval), (disturbances, auto), (faster, at_half))
    )

    def days(seconds: float) -> float | None:
        return seconds / SECONDS_PER_DAY if steps and math.isfinite(seconds) else None

    return Goodput(
        node_mtbf_hours=disturbances.mtbf_seconds * problem.cluster.nodes / 3600,
        cluster_mtbf_hours=disturbances.mtbf_seconds / 3600,
        checkpoint_gbytes=sum(files) / 1e9,
        checkpoint_gbytes_per_second=speed[0],
        speed_from=speed[1],
        save_seconds=disturbances.save_seconds,
        restart_seconds=disturbances.restart_seconds,
        interval_steps=interval,
        fraction=spent.trained / spent.total,
        days_without_failures=days(spent.trained),
        expected_days=days(spent.total),
        lost_to_saves_days=days(spent.saves),
        lost_to_failures_days=days(spent.lost),
        lost_to_restarts_days=days(spent.restarts),
        expected_failures=spent.total / disturbances.mtbf_seconds
        if days(spent.total) is not None
        else None,
        worth_of_half_the_save_days=days(spent.total - half.total),
        auto_interval_steps=auto,
        auto_expected_days=days(best.total),
        memory=memory,
    )


def memory_copy_cost(problem: Problem, estimate: Estimate) -> MemoryCopyCost:
    """Price the copies in host memory of a layout.

    A rank writes its part and its peer's with their SHA-256, sends its own over the network, and on
    a GPU reads it over the host link first.
    """
    cluster, constants = problem.cluster, goodput_constants()
    disturbances, nodes, _ = _disturbances(problem, estimate, None)
    rank_bytes = max(nodes) / cluster.gpus_per_node
    seconds = rank_bytes / (constants["memory_copy_gbytes_per_second"] * 1e9)
    if cluster.nodes > 1:
        seconds += rank_bytes / cluster.inter_node_bytes_per_second
    if not cluster.gpu.is_cpu:
        seconds += rank_bytes / default_constants().host_link_bytes_per_second
    every = problem.recipe.checkpoint.in_memory_every
    if not isinstance(every, int):
        copies = dataclasses.replace(disturbances, save_seconds=seconds)
        every = auto_interval(copies, estimate.time.step_seconds, estimate.training.steps)
    return MemoryCopyCost(
        every_steps=every,
        node_gbytes=max(nodes) / 1e9,
        host_gbytes=COPIES_HELD * max(nodes) * min(cluster.nodes, 2) / 1e9,
        copy_seconds=seconds,
        seconds_per_step=seconds / every,
    )


def expected_seconds_with_copies(
    d: FailureModel, step_seconds: float, steps: int, interval: int, memory: MemoryCopyCost
) -> ExpectedTime:
    """Return the expected time of a training with copies in memory and, every `interval` steps, a
    save.

    Every failure takes one node, so the next attempt goes on from the last copy. A save is work
    that a failure may interrupt, like a step. d: its restart_seconds are those from memory
    """
    saves = -(-steps // interval) * d.save_seconds
    copies = dataclasses.replace(d, save_seconds=memory.copy_seconds)
    longer = step_seconds + saves / steps
    spent = expected_seconds(copies, longer, steps, memory.every_steps)
    return dataclasses.replace(spent, trained=steps * step_seconds, saves=spent.saves + saves)


def check_host_memory(problem: Problem, estimate: Estimate, copies: MemoryCopyCost) -> None:
    """Raise Refusal, SW5220, where two copies are known not to fit beside offloaded states."""
    has = problem.cluster.host_memory_bytes
    if has is None:
        return
    needed = copies.host_gbytes * 1e9 + offloaded_bytes(
        problem.recipe.training.optimizer.name,
        estimate.strategy.offload,
        problem.graph.total_parameters,
        problem.cluster.nodes,
    )
    if fits_in_host_memory(has, needed):
        return
    raise refusal(
        "SW5220",
        f"checkpoint.in_memory needs {needed / 2**30:.1f} GiB of each node's memory, which has "
        f"{has / 2**30:.1f} GiB",
        "Use more nodes, each of which then holds less, or remove checkpoint.in_memory.",
        ("checkpoint", "in_memory"),
    )


def _disturbances(
    problem: Problem, estimate: Estimate, measured: float | None
) -> tuple[FailureModel, list[float], tuple[float, str]]:
    """Return the failure model, each node's checkpoint bytes, and a node's speed with its source.

    A restart takes the constant's seconds, one host's check of every byte
    (checkpoint/resume_checkpoint.py), and each node's read of its part, which takes as long as its
    write.
    """
    given, constants = problem.recipe.cluster, goodput_constants()
    hours = given.node_mtbf_hours or constants["node_mtbf_hours"]
    if given.checkpoint_gbytes_per_second:
        speed = given.checkpoint_gbytes_per_second, "recipe"
    elif measured:
        speed = measured, "measured"
    else:
        speed = constants["checkpoint_gbytes_per_second"], "default"
    priced = with_boundaries(
        build_priced_layout(problem, estimate.strategy, default_constants()), estimate.boundaries
    )
    nodes = node_checkpoint_bytes(priced)
    save = max(nodes) / (speed[0] * 1e9)
    check = sum(nodes) / (constants["check_gbytes_per_second"] * 1e9)
    found = FailureModel(
        mtbf_seconds=hours * 3600 / problem.cluster.nodes,
        save_seconds=save,
        restart_seconds=constants["restart_seconds"] + check + save,
    )
    return found, nodes, speed


@memoize(lambda graph: graph.identity)
def _numel_by_name(graph: ModelGraph) -> dict[str, int]:
    return {p.name: p.numel for layer in graph.layers for p in layer.parameters}


def node_checkpoint_bytes(priced: PricedLayout) -> list[float]:
    """Return the bytes that each node writes of a checkpoint's tensors, in rank order.

    Of a trained element they are its master copy and moments; of a frozen one its value, as the
    model computes with it. Data (and context) ranks share out what ZeRO shares out, the optimizer's
    states from stage 1 and frozen weights at stage 3; else the first one writes. Of tensor ranks
    with the same elements, and of a tied parameter's two stages, one writes: the ranks' parts are
    scaled to the whole.
    """
    s, graph = priced.strategy, priced.graph
    names = frozen_parameter_names(graph, priced.recipe.model.freeze)
    whole = _numel_by_name(graph)
    total = sum(whole.values())
    left = 0 if priced.adapter_sizes else total - sum(whole[name] for name in names)
    row = OPTIMIZERS[priced.recipe.training.optimizer.name]
    trained: float = row.state_bytes * (priced.adapter_sizes[-1] if priced.adapter_sizes else left)
    optimizer, freeze = priced.recipe.training.optimizer.name, priced.recipe.model.freeze
    matrices = matrix_parameters(optimizer, graph, freeze)
    trained -= row.matrix_saving_bytes * sum(p.numel for p in matrices)
    if row.factors:
        trained += row.moment_bytes * sum(map(factor_elements, matrices))
    frozen = priced.element_bytes * (total - left)
    parts = [(trained, s.zero_stage >= 1, priced.trainable_numel_of)]
    if frozen:
        parts.append(
            (
                frozen,
                s.zero_stage == 3,
                priced.numel_of_chunks if priced.adapter_sizes else priced.frozen_numel_of,
            )
        )
    nodes = [0.0] * priced.cluster.nodes
    for size, shared, elements in parts:
        of_stage = [elements(blocks) for blocks in priced.ranks]
        writers = s.tensor * (s.zero_world_size if shared else 1)
        for rank, stage in _ranks(priced):
            if shared or rank // s.tensor % s.zero_world_size == 0:
                share = of_stage[stage] / (sum(of_stage) * writers)
                nodes[rank // priced.cluster.gpus_per_node] += size * share
    return nodes


def _ranks(priced: PricedLayout) -> Iterator[tuple[int, int]]:
    """(rank, pipeline rank): the pipeline is the slowest axis, then data, context and tensor
    (plan/plan_builder.py)."""
    a_stage = priced.strategy.tensor * priced.strategy.zero_world_size
    return ((rank, rank // a_stage) for rank in range(priced.strategy.world_size))

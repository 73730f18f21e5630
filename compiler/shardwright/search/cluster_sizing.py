"""Choose `cluster.nodes: auto`: the fewest nodes that finish within `training.days_at_most`."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from shardwright.cost.layer_shapes import model_shapes
from shardwright.cost.layer_times import peak_flops
from shardwright.cost.layout_costs import SECONDS_PER_DAY
from shardwright.cost.step_time import FORWARDS_PER_STEP, forward_flops_per_token
from shardwright.diagnostics import Refusal, refusal
from shardwright.layout.axes import reachable_world_sizes
from shardwright.layout.gpu_cluster import Cluster
from shardwright.layout.planning_problem import Problem
from shardwright.search.layout_search import search

MOST_GPUS = 65_536  # as many as a plan.json lists: beyond it no answer could be compiled
HOURS_PER_DAY = 24
LARGER = 2
"""Times the recipe's batch: what `nodes: auto` prices beside it."""
TRIED_SHARES = (0.0, 0.25, 0.5)
"""Searched cluster sizes, as shares of the way from perfect scaling's nodes to those that the
recipe's own batch needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSizing:
    """Says why this number of nodes. smaller_nodes: the largest smaller cluster with any layout,
    None where there is none; smaller_days: what its best layout takes, None where none fits in
    memory."""

    nodes: int
    days: float
    days_at_most: float
    smaller_nodes: int | None
    smaller_days: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallerClusterBatch:
    """Holds a batch that a smaller cluster divides and that meets the deadline over the same
    tokens. cost: None without a price; cost_now: with the recipe's own batch."""

    global_batch_size: int
    nodes: int
    days: float
    cost: float | None
    cost_now: float | None


def smaller_cluster_batch(problem: Problem, sizing: ClusterSizing) -> SmallerClusterBatch | None:
    """Return a batch near the recipe's that meets the deadline with fewer nodes; None where
    there is none. Searches a few clusters, from the size that would do if the step scaled
    perfectly. problem: with its nodes chosen."""
    recipe, cluster = problem.recipe, problem.cluster
    training = recipe.training
    tried: set[int] = set()
    for share in TRIED_SHARES:
        nodes = _round(
            sizing.nodes * (sizing.days / sizing.days_at_most) * (1 - share) + sizing.nodes * share
        )
        batch = _nearest_multiple(training.global_batch_size, nodes * cluster.gpus_per_node)
        if nodes >= sizing.nodes or nodes in tried or batch in (0, training.global_batch_size):
            continue
        tried.add(nodes)
        ranked = search(_with_batch(with_nodes(problem, nodes), batch)).ranked
        if ranked and ranked[0].training.days <= sizing.days_at_most:
            price = cluster.price_per_gpu_hour
            now = (
                None if price is None else sizing.days * HOURS_PER_DAY * cluster.world_size * price
            )
            found = ranked[0].training
            return SmallerClusterBatch(
                global_batch_size=batch, nodes=nodes, days=found.days, cost=found.cost, cost_now=now
            )
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class LargerBatch:
    """Holds what LARGER times the batch takes on the same cluster over as many tokens. shorter:
    the share of the days that it saves."""

    global_batch_size: int
    days: float
    shorter: float


def larger_batch(problem: Problem, sizing: ClusterSizing) -> LargerBatch | None:
    """Price a larger batch; None where no layout of it fits. problem: with its nodes chosen."""
    batch = LARGER * problem.recipe.training.global_batch_size
    ranked = search(_with_batch(problem, batch)).ranked
    if not ranked:
        return None
    days = ranked[0].training.days
    return LargerBatch(global_batch_size=batch, days=days, shorter=1 - days / sizing.days)


def _with_batch(problem: Problem, batch: int) -> Problem:
    """Return the problem with this global batch and the number of steps that train the same
    tokens."""
    training = problem.recipe.training
    steps = math.ceil(training.step_count_or_zero * training.global_batch_size / batch)
    changed = dataclasses.replace(training, global_batch_size=batch, steps=steps, tokens=None)
    return dataclasses.replace(
        problem, recipe=dataclasses.replace(problem.recipe, training=changed)
    )


def _round(nodes: float) -> int:
    """Round up to a usual cluster size: a multiple of 8 from 64 nodes on, of 4 from 32, of 2
    from 16."""
    step = 1 << max(0, int(math.log2(max(1.0, nodes))) - 3)
    return math.ceil(nodes / step) * step


def _nearest_multiple(batch: int, world: int) -> int:
    """Return the multiple of `world` nearest to the batch; 0 where that is more than 1.5 times
    the batch or less than half."""
    near = max(1, round(batch / world)) * world
    return near if batch / 2 <= near <= 1.5 * batch else 0


def size_cluster(problem: Problem) -> tuple[Problem, ClusterSizing | None]:
    """Return the problem with its number of nodes; unchanged, with None, where the recipe gives it.

    With `nodes: auto` the problem's cluster has one node. Exact: each smaller number of nodes
    has no layout (the degrees and the batch do not divide), cannot be fast enough at the GPUs'
    peak, or was searched. Raises Refusal: SW3003 (an unknown number of steps), SW3204 (no
    cluster is fast enough).
    """
    recipe, cluster = problem.recipe, problem.cluster
    if recipe.cluster.nodes is not None:
        return problem, None
    steps, days = recipe.training.step_count_or_zero, recipe.training.days_at_most
    if not steps or days is None:
        raise refusal(
            "SW3003",
            (
                "nodes: auto needs the number of steps, and `epochs` does not tell it before the "
                "data is read"
            ),
            "Give training.steps or training.tokens, or the number of nodes.",
            key=("cluster", "nodes"),
        )
    limit = days * SECONDS_PER_DAY / steps
    fewest = _work_seconds(problem) / limit / cluster.gpus_per_node
    gpus = cluster.gpus_per_node
    smaller: int | None = None
    smaller_days: float | None = None
    fastest: tuple[float, int] | None = None
    for nodes in sorted(
        world // gpus
        for world in reachable_world_sizes(problem)
        if world % gpus == 0 and world <= MOST_GPUS
    ):
        if nodes < fewest:
            smaller = nodes
            continue
        sized = with_nodes(problem, nodes)
        ranked = search(sized).ranked
        seconds = (
            ranked[0].time.step_seconds if ranked else None
        )  # of the plan that would be chosen
        if seconds is not None and seconds <= limit:
            if smaller is not None and smaller_days is None:  # the bound may have skipped it
                below = search(with_nodes(problem, smaller)).ranked
                smaller_days = below[0].training.days if below else None
            return sized, ClusterSizing(
                nodes=nodes,
                days=seconds * steps / SECONDS_PER_DAY,
                days_at_most=days,
                smaller_nodes=smaller,
                smaller_days=smaller_days,
            )
        if seconds is not None:
            fastest = min(fastest or (seconds, nodes), (seconds, nodes))
        smaller, smaller_days = (
            nodes,
            None if seconds is None else seconds * steps / SECONDS_PER_DAY,
        )
    raise _too_slow(days, steps, fastest, cluster)


def with_nodes(problem: Problem, nodes: int) -> Problem:
    section = dataclasses.replace(problem.recipe.cluster, nodes=nodes)
    recipe = dataclasses.replace(problem.recipe, cluster=section)
    return dataclasses.replace(
        problem, recipe=recipe, cluster=dataclasses.replace(problem.cluster, nodes=nodes)
    )


def _work_seconds(problem: Problem) -> float:
    """Return a step's GPU-seconds at the dense peak: no layout takes less."""
    recipe, graph, cluster = problem.recipe, problem.graph, problem.cluster
    shapes = model_shapes(graph, 1)
    _, _, scores = shapes.decoder_flops
    training = recipe.training
    tokens = training.tokens_per_step
    # Fused causal attention skips half of the scores that are counted.
    forward = (
        forward_flops_per_token(shapes, training.sequence_length)
        - scores * training.sequence_length // 2
    )
    forwards = FORWARDS_PER_STEP - (recipe.lora is not None)
    return forwards * forward * tokens / peak_flops(cluster.gpu, training.precision)


def _too_slow(
    days: float, steps: int, fastest: tuple[float, int] | None, cluster: Cluster
) -> Refusal:
    if fastest is None:
        message = f"no cluster of up to {MOST_GPUS} x {cluster.gpu.name} has a layout that fits"
        help_text = (
            "A larger GPU, a shorter sequence or fewer pins would help; `plan` with a "
            "number says more."
        )
    else:
        seconds, nodes = fastest
        message = f"no cluster of {cluster.gpu.name} finishes within {days:g} days"
        help_text = (
            f"The fastest has {nodes_text(nodes)}: {seconds * steps / SECONDS_PER_DAY:.3g} days. "
            "A larger global_batch_size lets more GPUs work at once; fewer tokens, a faster GPU or "
            "a later deadline help, too."
        )
    return refusal("SW3204", message, help_text, key=("training", "days_at_most"))


def nodes_text(count: int) -> str:
    return f"{count} node{'' if count == 1 else 's'}"

"""`cluster.nodes: auto`: the fewest nodes that finish within `training.days_at_most`, and what bounds them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from shardwright.cost.compute import peak_flops
from shardwright.cost.estimate import SECONDS_PER_DAY
from shardwright.cost.shapes import model_shapes
from shardwright.cost.timing import FORWARDS_PER_STEP, forward_flops_per_token
from shardwright.diagnostics import Diagnostic, Refusal
from shardwright.ir.cluster import Cluster
from shardwright.ir.divisors import divisors
from shardwright.ir.model_graph import ModelGraph
from shardwright.ir.recipe import Recipe
from shardwright.search.search import search

MOST_GPUS = 65_536  # as many as a plan.json lists: beyond it no answer could be compiled


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """smaller_nodes: the largest cluster below that has a layout at all, None where there is none; smaller_days: what
    its best layout takes, None where none fits in memory."""

    nodes: int
    days: float
    days_at_most: float
    smaller_nodes: int | None
    smaller_days: float | None

    def bound(self) -> str:
        """What keeps the cluster from being smaller, in one sentence."""
        if self.smaller_nodes is None:
            return "no smaller cluster divides the batch over its GPUs"
        if self.smaller_days is None:
            return f"memory bounds it: on {_nodes(self.smaller_nodes)} no layout fits"
        return f"time bounds it: on {_nodes(self.smaller_nodes)} it would take {self.smaller_days:.3g} days"


def size_cluster(recipe: Recipe, graph: ModelGraph, cluster: Cluster) -> tuple[Recipe, Cluster, Sizing | None]:
    """The recipe and cluster with their number of nodes; as given, and None, where the recipe has one.

    cluster: of one node where the recipe says auto. Exact: every number of nodes below the answer either has no layout
    (the degrees and the batch do not divide), cannot be fast enough at the GPUs' peak, or was searched. Raises Refusal:
    SW3003 (an unknown number of steps), SW3204 (no cluster is fast enough).
    """
    if recipe.cluster.nodes is not None:
        return recipe, cluster, None
    steps, days = recipe.training.known_steps, recipe.training.days_at_most
    if not steps or days is None:
        raise Refusal(
            Diagnostic(
                code="SW3003",
                message="nodes: auto needs the number of steps, and `epochs` does not tell it before the data is read",
                help="Give training.steps or training.tokens, or the number of nodes.",
                key=("cluster", "nodes"),
            )
        )
    limit = days * SECONDS_PER_DAY / steps
    fewest = _work_seconds(recipe, graph, cluster) / limit / cluster.gpus_per_node
    smaller: tuple[int, float | None] | None = None
    fastest: tuple[float, int] | None = None
    for nodes in _sizes(recipe, graph, cluster):
        sized = dataclasses.replace(cluster, nodes=nodes)
        if nodes < fewest:
            smaller = (nodes, None)
            continue
        there = _with_nodes(recipe, nodes)
        ranked = search(there, graph, sized).ranked
        seconds = ranked[0].time.step_seconds if ranked else None  # of the plan that would be chosen
        if seconds is not None and seconds <= limit:
            return there, sized, _sizing(recipe, graph, cluster, nodes, seconds * steps, days, smaller)
        if seconds is not None:
            fastest = min(fastest or (seconds, nodes), (seconds, nodes))
        smaller = (nodes, None if seconds is None else seconds * steps / SECONDS_PER_DAY)
    raise Refusal(_too_slow(days, steps, fastest, cluster))


def _sizing(
    recipe: Recipe,
    graph: ModelGraph,
    cluster: Cluster,
    nodes: int,
    seconds: float,
    days: float,
    smaller: tuple[int, float | None] | None,
) -> Sizing:
    """The next smaller cluster is searched where the bound had skipped it."""
    below: float | None = None
    if smaller is not None:
        below = smaller[1]
        if below is None:
            sized = dataclasses.replace(cluster, nodes=smaller[0])
            ranked = search(_with_nodes(recipe, smaller[0]), graph, sized).ranked
            below = ranked[0].training.days if ranked else None
    return Sizing(
        nodes=nodes,
        days=seconds / SECONDS_PER_DAY,
        days_at_most=days,
        smaller_nodes=None if smaller is None else smaller[0],
        smaller_days=below,
    )


def _with_nodes(recipe: Recipe, nodes: int) -> Recipe:
    return dataclasses.replace(recipe, cluster=dataclasses.replace(recipe.cluster, nodes=nodes))


def _sizes(recipe: Recipe, graph: ModelGraph, cluster: Cluster) -> Iterator[int]:
    """Every number of nodes that some tensor x pipeline x data makes up, ascending."""
    pins, gpus, batch = recipe.parallelism, cluster.gpus_per_node, recipe.training.global_batch_size
    tensors = divisors(gpus) if pins.tensor is None else (pins.tensor,)
    pipelines = range(1, len(graph.layers) + 1) if pins.pipeline is None else (pins.pipeline,)
    datas = divisors(batch) if pins.data is None else (pins.data,)
    worlds = {t * p * d for t in tensors for p in pipelines for d in datas}
    yield from sorted(world // gpus for world in worlds if world % gpus == 0 and world <= MOST_GPUS)


def _work_seconds(recipe: Recipe, graph: ModelGraph, cluster: Cluster) -> float:
    """GPU-seconds of a step at the dense peak: no layout takes less."""
    shapes = model_shapes(graph, 1)
    _, _, scores = shapes.decoder_flops
    training = recipe.training
    tokens = training.global_batch_size * training.sequence_length
    # Fused causal attention skips half of the scores that are counted.
    forward = forward_flops_per_token(shapes, training.sequence_length) - scores * training.sequence_length // 2
    forwards = FORWARDS_PER_STEP - (recipe.lora is not None)
    return forwards * forward * tokens / peak_flops(cluster.gpu, training.precision)


def _too_slow(days: float, steps: int, fastest: tuple[float, int] | None, cluster: Cluster) -> Diagnostic:
    if fastest is None:
        message = f"no cluster of up to {MOST_GPUS} x {cluster.gpu.name} has a layout that fits"
        help_text = "A larger GPU, a shorter sequence or fewer pins would help; `plan` with a number says more."
    else:
        seconds, nodes = fastest
        message = f"no cluster of {cluster.gpu.name} finishes within {days:g} days"
        help_text = (
            f"The fastest has {_nodes(nodes)}: {seconds * steps / SECONDS_PER_DAY:.3g} days. A larger "
            "global_batch_size lets more GPUs work at once; fewer tokens, a faster GPU or a later deadline help, too."
        )
    return Diagnostic(code="SW3204", message=message, help=help_text, key=("training", "days_at_most"))


def _nodes(count: int) -> str:
    return f"{count} node{'' if count == 1 else 's'}"

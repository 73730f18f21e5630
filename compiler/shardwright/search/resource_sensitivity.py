"""What a little more of each resource would change: the chosen layout priced again, and the search
run again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from shardwright.cluster.cluster_types import Cluster, Gpu
from shardwright.layout.layout_estimate import Estimate
from shardwright.layout.planning_problem import Problem
from shardwright.search.layout_resolution import estimate_layout
from shardwright.search.layout_search import search

MORE_FACTOR = 1.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """same: the chosen layout on the better cluster; best: the layout that a search finds there
    (the same strategy where nothing better comes up), None where none fits."""

    resource: str
    same: Estimate
    best: Estimate | None


def sensitivities(problem: Problem, chosen: Estimate) -> tuple[Sensitivity, ...]:
    """Resources that the cluster has no use for (links between nodes, on one node) are left out."""
    cluster = problem.cluster
    found: list[Sensitivity] = []
    for resource, (matters, better) in RESOURCES.items():
        if matters(cluster):
            there = dataclasses.replace(problem, cluster=better(cluster))
            same, best = (
                estimate_layout(there, chosen.strategy),
                next(iter(search(there).ranked), None),
            )
            found.append(Sensitivity(resource=resource, same=same, best=best))
    return tuple(found)


def _faster_gpu(cluster: Cluster) -> Cluster:
    """At the same power a FLOP: with the old limit in watts a board would throttle away what it
    gains."""
    gpu = cluster.gpu
    peaks = {precision: flops * MORE_FACTOR for precision, flops in gpu.peak_flops.items()}
    watts = None if gpu.watts is None else gpu.watts * MORE_FACTOR
    best = None if gpu.best_product_flops is None else gpu.best_product_flops * MORE_FACTOR
    return _with_gpu(cluster, peak_flops=peaks, watts=watts, best_product_flops=best)


def _with_gpu(cluster: Cluster, **changes: object) -> Cluster:
    changed: Gpu = dataclasses.replace(cluster.gpu, **changes)  # type: ignore[arg-type]
    return dataclasses.replace(cluster, gpu=changed)


# resource -> whether a cluster has a use for it, and the cluster with more of it
RESOURCES: dict[str, tuple[Callable[[Cluster], bool], Callable[[Cluster], Cluster]]] = {
    "inter_node_bandwidth": (
        lambda c: c.nodes > 1,
        lambda c: dataclasses.replace(
            c, inter_node_bytes_per_second=c.inter_node_bytes_per_second * MORE_FACTOR
        ),
    ),
    "intra_node_bandwidth": (
        lambda c: c.gpus_per_node > 1,
        lambda c: dataclasses.replace(
            c, intra_node_bytes_per_second=c.intra_node_bytes_per_second * MORE_FACTOR
        ),
    ),
    "memory": (lambda c: True, lambda c: _with_gpu(c, memory_gib=c.gpu.memory_gib * MORE_FACTOR)),
    "memory_bandwidth": (
        lambda c: True,
        lambda c: _with_gpu(c, hbm_bytes_per_second=c.gpu.hbm_bytes_per_second * MORE_FACTOR),
    ),
    "peak_flops": (lambda c: True, _faster_gpu),
}

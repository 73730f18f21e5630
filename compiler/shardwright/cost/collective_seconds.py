"""Estimate the seconds of collectives and sends: ring latency plus bytes over the slowest link's
rate.

A ring over n ranks takes n - 1 steps and moves (n - 1) / n of the data past each rank for an
all-gather or a reduce-scatter, and twice both for an all-reduce (Thakur et al., 2005; Patarasu and
Yuan, 2009). NCCL builds one ring per adapter over the nodes. Where q members share a node, the data
enters and leaves over q adapters at once. The rate per rank is then the smaller of q adapters' rate
and the node's own links' rate. It falls with the number of ranks, by the fabric between nodes
(cost/collective_bandwidth.json).

Nodes that NVLink joins count as one node (cluster.nvlink_domain_gpus).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwright.cost.collective_bandwidth import Collective, bandwidth_share
from shardwright.cost.cost_constants import Constants
from shardwright.layout.gpu_cluster import Cluster
from shardwright.recipe.literal_types import Fabric

# Gloo has no reduce-scatter: it takes at least an all-reduce's time. Its all-gather takes this many
# halves of an all-reduce (17 MB over 2 and 4 ranks of one machine: 1.1 to 1.8;
# benchmarks/gloo.json).
GLOO_ALL_GATHER = 1.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Describe a process group of equally spaced ranks; nodes are filled in order.

    ranks_per_node: ranks in each NVLink domain, which may have several nodes
    """

    ranks: int
    ranks_per_node: int
    fabric: Fabric = "infiniband"

    @property
    def spans_nodes(self) -> bool:
        return self.ranks > self.ranks_per_node

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.ranks_per_node)


def group_of(cluster: Cluster, ranks: int, stride: int, fabric: Fabric | None = None) -> Group:
    """Return the group of `ranks` ranks that are `stride` apart.

    fabric: the published run's; the cluster's where the recipe names one
    """
    inside = max(1, cluster.nvlink_domain_gpus // stride)
    between = cluster.fabric if fabric is None or cluster.fabric_is_given else fabric
    return Group(ranks=ranks, ranks_per_node=min(ranks, inside), fabric=between)


def bytes_per_second(
    cluster: Cluster,
    c: Constants,
    group: Group,
    message_bytes: float,
    collective: Collective = "all_gather",
) -> float:
    """Return the rate per rank of a large collective."""
    inside = cluster.intra_node_bytes_per_second * c.intra_node_efficiency
    if not group.spans_nodes:
        return inside
    each = message_bytes / group.ranks_per_node
    measured = bandwidth_share(group.fabric, collective, group.ranks, group.nodes, each)
    share = c.inter_node_efficiency if measured is None else measured
    across = cluster.inter_node_bytes_per_second * share * group.ranks_per_node
    return min(inside, across) if group.ranks_per_node > 1 else across


def ring_start_seconds(c: Constants, group: Group) -> float:
    """Return the latency of a ring's n - 1 steps; those between nodes are slower."""
    if group.ranks == 1:
        return 0.0
    between = group.nodes if group.spans_nodes else 0
    return (
        between * c.inter_node_hop_seconds
        + max(0, group.ranks - 1 - between) * c.intra_node_hop_seconds
    )


def gather_seconds(
    cluster: Cluster,
    c: Constants,
    group: Group,
    total_bytes: float,
    calls: float = 1.0,
    collective: Collective = "all_gather",
) -> float:
    """Return the seconds of an all-gather to total_bytes on each rank, or of their reduce-scatter.

    calls: how many collectives the bytes are split into
    """
    n = group.ranks
    if n == 1:
        return 0.0
    rate = bytes_per_second(cluster, c, group, total_bytes, collective)
    if cluster.gpu.kind.backend == "gloo" and collective == "all_gather":
        rate /= GLOO_ALL_GATHER
    return calls * ring_start_seconds(c, group) + (n - 1) / n * total_bytes / rate


def reduce_scatter_seconds(
    cluster: Cluster, c: Constants, group: Group, total_bytes: float, calls: float = 1.0
) -> float:
    if cluster.gpu.kind.backend == "gloo":  # it has no reduce-scatter
        return all_reduce_seconds(cluster, c, group, total_bytes, calls)
    return gather_seconds(cluster, c, group, total_bytes, calls)


def all_reduce_seconds(
    cluster: Cluster, c: Constants, group: Group, total_bytes: float, calls: float = 1.0
) -> float:
    return 2 * gather_seconds(cluster, c, group, total_bytes, calls, "all_reduce")


def all_to_all_seconds(
    cluster: Cluster,
    c: Constants,
    group: Group,
    total_bytes: float,
    calls: float = 1.0,
    efficiency: float | None = None,
) -> float:
    """Return the seconds in which each rank sends an equal piece of total_bytes to each other one.

    Pieces for the same node use its links and others the rank's own adapter, both at once.

    efficiency: share of both links' rate; None: as of other collectives
    """
    n, here = group.ranks, group.ranks_per_node
    if n == 1:
        return 0.0
    inside = (
        (here - 1)
        / n
        * total_bytes
        / (cluster.intra_node_bytes_per_second * (efficiency or c.intra_node_efficiency))
    )
    start, across = c.intra_node_hop_seconds, 0.0
    if group.spans_nodes:
        start = c.inter_node_hop_seconds
        across = (
            (n - here)
            / n
            * total_bytes
            / (cluster.inter_node_bytes_per_second * (efficiency or c.inter_node_efficiency))
        )
    return calls * start + max(inside, across)


def distinct_places(places: float, experts: int, reachable_share: float = 1.0) -> float:
    """Return how many of these places have any of a token's experts, on average.

    reachable_share: of the places that may have a token's experts, where the router limits it to
        some groups of experts (arXiv 2412.19437, 2.1.2: node-limited routing)
    """
    reachable = max(1.0, places * reachable_share)
    return reachable * (1 - math.pow(1 - 1 / reachable, experts))


def deduplicated_all_to_all_seconds(
    cluster: Cluster,
    c: Constants,
    group: Group,
    total_bytes: float,
    experts: int,
    reachable_share: float = 1.0,
) -> float:
    """Return the seconds of DeepEP's dispatch and combine, whose bytes are of `experts` copies.

    A token crosses to each other node that has any of its experts once, N (1 - (1 - 1/N)^k)
    (N - 1)/N times of it, and goes on to each rank there once (DeepEP's README). Both overlap.

    reachable_share: of the nodes and ranks, see distinct_places
    """
    n, here, nodes = group.ranks, group.ranks_per_node, group.nodes
    if n == 1:
        return 0.0

    def copies(places: int) -> float:
        return distinct_places(places, experts, reachable_share)

    token_bytes = total_bytes / experts
    inside = copies(n) * (here - 1) / here * token_bytes
    inside /= cluster.intra_node_bytes_per_second * c.deepep_intra_node_efficiency
    start, across = c.intra_node_hop_seconds, 0.0
    if group.spans_nodes:
        start = c.inter_node_hop_seconds
        across = copies(nodes) * (nodes - 1) / nodes * token_bytes
        across /= cluster.inter_node_bytes_per_second * c.deepep_inter_node_efficiency
    return 2 * start + max(inside, across)


def send_seconds(cluster: Cluster, c: Constants, distance: int, message_bytes: float) -> float:
    """Return the seconds of one message to the rank `distance` further; nodes are filled in
    order."""
    if distance >= cluster.nvlink_domain_gpus:
        return c.inter_node_hop_seconds + message_bytes / (
            cluster.inter_node_bytes_per_second * c.inter_node_efficiency
        )
    return c.intra_node_hop_seconds + message_bytes / (
        cluster.intra_node_bytes_per_second * c.intra_node_efficiency
    )

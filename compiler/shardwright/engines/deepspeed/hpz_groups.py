"""The second copy of ZeRO-3's weights inside a node (hpZ, arXiv 2306.10209): what DeepSpeed leaves
to us."""

from __future__ import annotations

from deepspeed import comm as dist
from deepspeed.utils import groups
from torch import nn

from shardwright.plan.plan import Plan


def hpz_group(plan: Plan) -> dist.ProcessGroup | None:
    """Collective. The ranks that share one secondary copy; None without hpZ.

    DeepSpeed's own (utils/groups.py, _create_zero_param_parallel_group) are consecutive ranks of
    the world: under tensor parallelism those hold other shards, and a gather over them is another
    matrix. It makes them at most once a process, too. Its readers look at the variable, so that is
    where ours stands.
    """
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    size = plan.strategy.hpz_partition_size
    if size == 1:
        return None
    sharing: dict[tuple[int, int], list[int]] = {}
    for rank in plan.ranks:
        sharing.setdefault((rank.tensor, rank.data // size), []).append(rank.rank)
    for ranks in sharing.values():  # each rank makes all groups, in the same order
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = group
    return groups._ZERO_PARAM_INTRA_PARALLEL_GROUP


def drop_hpz_copies(module: nn.Module) -> None:
    """After weights were loaded: the next gather makes the copy anew. DeepSpeed drops that of
    trained weights only (zero/stage3.py, invalidate_secondary_tensor); one of a frozen weight would
    be stale for good."""
    for parameter in module.parameters():
        if hasattr(parameter, "ds_secondary_tensor"):
            parameter.ds_secondary_tensor = None

"""hpZ (ZeRO++, arXiv 2306.10209, section 3.2): a second copy of ZeRO-3's weights, shared out inside each node, so that
they are gathered without the links between nodes."""

from __future__ import annotations

from dataclasses import replace

from shardwright.cost.collectives import group_of
from shardwright.cost.data_parallel import data_comm_seconds
from shardwright.cost.layout import Layout
from shardwright.cost.passes import passes
from shardwright.cost.timing import stage_seconds
from shardwright.engines.table import ENGINES
from shardwright.layout.hpz import asks_for_none


def with_hpz(layout: Layout) -> Layout | None:
    """The same layout with the second copy; None where the recipe wants none, where no data group has several ranks on
    each of several nodes, and where DeepSpeed cannot: below ZeRO-3, and under offload (the loss freezes,
    DeepSpeed#6926)."""
    s, recipe = layout.strategy, layout.recipe
    own = ENGINES[recipe.target].traits.hpz and recipe.assume.kernels == "auto" and not asks_for_none(recipe.extra)
    if not own or s.zero_stage != 3 or s.pipeline > 1 or s.offload != "none":
        return None
    group = group_of(layout.cluster, s.data, s.tensor)
    if not 1 < group.ranks_per_node < group.ranks or group.ranks % group.ranks_per_node:
        return None
    return replace(layout, strategy=replace(s, hpz_partition_size=group.ranks_per_node))


def without_hpz(layout: Layout) -> Layout:
    return replace(layout, strategy=replace(layout.strategy, hpz_partition_size=1))


def is_faster(layout: Layout, than: Layout) -> bool:
    """Of two that differ in the second copy alone: it changes the data-parallel collectives and nothing else of a
    step."""
    return _collectives_seconds(layout) < _collectives_seconds(than)


def _collectives_seconds(layout: Layout) -> float:
    return data_comm_seconds(layout, 0, stage_seconds(layout, 0, passes(layout)).compute)

"""The layouts to try: every choice of the axes' values (layout/axes.py) that fills the cluster,
pins respected."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardwright.cluster.cluster_types import Cluster
from shardwright.engines.engine_table import ENGINES
from shardwright.layout.axes import (
    AXES,
    Value,
    as_int,
    choices,
    rank_axes,
    world_factorizations,
    world_size_of,
)
from shardwright.layout.layout import Layout, auto_by_default_axes
from shardwright.layout.planning_problem import Problem
from shardwright.recipe.recipe_types import Recipe

_make: Callable[..., Layout] = Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutGrid:
    """settled: the degrees, which fill the cluster, and what has one value there. axes: the values
    that the other keys can take, in the order in which a search settles them. The last is
    micro_batch_size, smallest first, so that memory only grows along it."""

    settled: Mapping[str, Value]
    axes: tuple[tuple[str, tuple[Value, ...]], ...]


def layout_grids(problem: Problem) -> Iterator[LayoutGrid]:
    """Every choice of degrees whose product is the world and whose data degree divides the batch.

    Nothing where the pins themselves do not multiply out (see `nearest`).
    """
    own = ENGINES[problem.recipe.target].axes
    for degrees in world_factorizations(problem):
        settled: dict[str, Value] = {**degrees}
        walked: list[tuple[str, tuple[Value, ...]]] = []
        for axis in AXES:
            if axis.section and not axis.ranks:
                values = choices(axis, problem, degrees)
                if not axis.runs and axis.name not in own and axis.pin(problem.recipe) is None:
                    settled[axis.name] = axis.plain
                elif axis.values is not None:
                    walked.append((axis.name, values))
                else:
                    settled[axis.name] = values[0]
        if all(values for _, values in walked):
            yield LayoutGrid(settled=settled, axes=tuple(walked))


def candidate_layouts(problem: Problem) -> Iterator[Layout]:
    """Every layout of every placement; the rules decide about them."""
    recipe = problem.recipe
    for placement in layout_grids(problem):
        names = [name for name, _ in placement.axes]
        for values in itertools.product(*(tried for _, tried in placement.axes)):
            yield layout_at(recipe, placement, dict(zip(names, values, strict=True)))


def layout_at(recipe: Recipe, placement: LayoutGrid, settled: Mapping[str, Value]) -> Layout:
    """Keys that are not settled yet stand at their first value."""
    first = {name: values[0] for name, values in placement.axes}
    return _strategy(recipe, {**placement.settled, **first, **settled})


def pinned_layout(recipe: Recipe, cluster: Cluster) -> Layout:
    """The pinned layout with plain values for the rest, whether or not it multiplies out: what the
    rules explain."""
    pins = {axis.name: axis.pin(recipe) for axis in AXES if axis.section}
    values = {
        axis.name: axis.plain if (pin := pins.get(axis.name)) is None else pin
        for axis in AXES
        if axis.section
    }

    def room(name: str) -> int:
        """What the other degrees leave of the world to this one; 0 where they do not divide it."""
        others = world_size_of(
            {axis.name: as_int(values[axis.name]) for axis in rank_axes()}
        ) // as_int(values[name])
        return 0 if cluster.world_size % others else cluster.world_size // others

    *others, last = (axis.name for axis in rank_axes())
    if pins[last] is None:
        values[last] = max(
            1,
            cluster.world_size
            // world_size_of({name: as_int(values[name]) for name in (*others, last)}),
        )
    free = next((name for name in others if pins[name] is None and room(name)), None)
    if free is not None:
        values[free] = room(free)
    return _strategy(recipe, values)


def without_layout_pins(recipe: Recipe) -> Recipe:
    """`offload` stays: a search that was not asked for it does not move states to the host."""
    free: dict[str, Any] = {axis.name: None for axis in auto_by_default_axes()}
    pins = dataclasses.replace(recipe.parallelism, **free)
    return dataclasses.replace(recipe, parallelism=pins)


def zero_baseline(recipe: Recipe, *, zero_stage: int) -> Recipe:
    """The same run as people run it today: nothing beyond data parallelism and this ZeRO stage."""
    free = without_layout_pins(recipe)
    left = [
        axis
        for axis in AXES
        if axis.is_auto_by_default
        or (axis.off_when_world_pinned and axis.section and axis.pin(recipe) is None)
    ]
    plain: dict[str, Any] = {axis.name: axis.plain for axis in left if axis.feature}
    pins = dataclasses.replace(free.parallelism, **plain, zero_stage=zero_stage)
    return dataclasses.replace(free, parallelism=pins)


def _strategy(recipe: Recipe, values: Mapping[str, Value]) -> Layout:
    """values: of all keys of the recipe. `loss: auto` is settled in search.settle."""
    at_once = as_int(values["micro_batch_size"]) * as_int(values["data"])
    return _make(
        **values, gradient_accumulation_steps=max(1, recipe.training.global_batch_size // at_once)
    )

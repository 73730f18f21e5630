"""The table of axes: complete, and what lists layouts reads it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, fields
from typing import Any, cast

import pytest

from shardwright.layout import axes
from shardwright.layout.axes import (
    AXES,
    Axis,
    axis_named,
    choices,
    is_world_pinned,
    reachable_world_sizes,
    world_factorizations,
)
from shardwright.layout.gpu_cluster import resolve_cluster
from shardwright.layout.layout import Layout, in_layer_axes, in_layer_collectives_text
from shardwright.layout.planning_problem import Problem
from shardwright.recipe.recipe_schema import recipe_schema
from shardwright.recipe.recipe_types import ParallelismSection
from shardwright.search.ranking_penalties import complexity_features
from tests.unit.models.factory import SMALL_LLAMA, graph_of, recipe_of
from tests.unit.search.test_layout_rules import GOOD


def test_collectives_are_named_by_the_axes_that_make_them() -> None:
    plain = dataclasses.replace(GOOD, tensor=1)
    assert in_layer_collectives_text(plain) == "tensor-parallel"
    assert in_layer_collectives_text(dataclasses.replace(plain, expert=2)) == "expert-parallel"
    mixed = dataclasses.replace(plain, tensor=2, context=2)
    assert in_layer_collectives_text(mixed) == "tensor- and context-parallel"
    assert (
        in_layer_collectives_text(mixed, dataclasses.replace(plain, expert=2))
        == "tensor-, expert- and context-parallel"
    )
    assert in_layer_axes(mixed) == ("tensor", "context")


NOT_OF_A_LAYOUT = {"memory_headroom"}


def problem_of(parallelism: ParallelismSection | None = None, **pins: object) -> Problem:
    """Two nodes of four GPUs, 16 sequences a step."""
    recipe = recipe_of(SMALL_LLAMA, parallelism=pins)
    recipe = dataclasses.replace(recipe, parallelism=parallelism or recipe.parallelism)
    return Problem(
        recipe=recipe, graph=graph_of(SMALL_LLAMA), cluster=resolve_cluster(recipe.cluster)
    )


def test_each_row_is_a_field_of_a_strategy() -> None:
    assert sorted(axis.name for axis in AXES) == sorted(field.name for field in fields(Layout))
    defaults = {f.name: f.default for f in fields(Layout) if f.default is not dataclasses.MISSING}
    assert defaults == {name: axis_named(name).off_value for name in defaults}


def test_the_rows_are_the_keys_of_the_recipe() -> None:
    ours = {axis.name: axis for axis in AXES if axis.section == "parallelism"}
    assert ours.keys() | NOT_OF_A_LAYOUT == {field.name for field in fields(ParallelismSection)}
    schema = cast(Any, recipe_schema())["properties"]["parallelism"]["properties"]
    assert {*ours, *NOT_OF_A_LAYOUT} == schema.keys()
    defaults = {name: schema[name]["default"] for name in ours}
    assert defaults == {
        name: "auto" if axis.default is None else axis.default for name, axis in ours.items()
    }
    for axis in AXES:
        assert not axis.section or axis.pin(problem_of().recipe) == axis.default


def test_words_and_pins_are_those_of_the_table() -> None:
    said = (
        "tensor=2 pipeline=2 data=2 zero_stage=1 micro_batch_size=1 activation_checkpointing=none "
        "schedule=1f1b"
    )
    assert GOOD.describe() == said and list(GOOD.pins()) == [
        *(w.split("=")[0] for w in said.split()),
        "offload",
    ]
    offloaded = dataclasses.replace(GOOD, offload="optimizer", virtual_stages=2)
    assert offloaded.describe() == f"{said} offload=optimizer virtual_stages=2"
    assert offloaded.pins() == {**GOOD.pins(), "offload": "optimizer", "virtual_stages": 2}
    assert (
        GOOD.degrees() == {"tensor": 2, "pipeline": 2, "context": 1, "data": 2}
        and GOOD.world_size == 8
    )
    assert (
        not GOOD.has_full_model_per_rank
        and dataclasses.replace(GOOD, tensor=1, pipeline=1).has_full_model_per_rank
    )


def test_degrees_fill_the_world_within_the_pins() -> None:
    world = problem_of().cluster.world_size
    found = [tuple(degrees.values()) for degrees in world_factorizations(problem_of())]
    assert len(found) == len(set(found)) and all(t * p * c * d == world for t, p, c, d in found)
    assert [d["data"] for d in world_factorizations(problem_of(tensor=2, pipeline=2))] == [
        world // 4
    ]
    assert not list(world_factorizations(problem_of(tensor=3)))
    assert {world, 3 * world} <= reachable_world_sizes(problem_of()) and reachable_world_sizes(
        problem_of(tensor=2, pipeline=3, data=5)
    ) == {30}


def test_a_micro_batch_divides_what_a_data_rank_has() -> None:
    micro, problem = axis_named("micro_batch_size"), problem_of()
    batch = problem.recipe.training.global_batch_size
    assert choices(micro, problem, {"data": batch // 4}) == (1, 2, 4)
    assert choices(micro, problem_of(micro_batch_size=2), {"data": batch // 4}) == (2,)
    assert choices(micro, problem_of(micro_batch_size=3), {"data": batch // 4}) == ()
    assert choices(micro, problem, {"data": batch - 1}) == ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WiderStrategy(Layout):
    ring: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WiderSection(ParallelismSection):
    ring: int | None = None


RING = Axis(
    name="ring",
    off_value=1,
    default=1,
    ranks=True,
    off_when_world_pinned=True,
    values=lambda problem, degrees: (1, 2, 4),
    feature="a ring",
)


def wider(problem: Problem, ring: int | None) -> Problem:
    section = {
        f.name: getattr(problem.recipe.parallelism, f.name) for f in fields(ParallelismSection)
    }
    return problem_of(WiderSection(**section, ring=ring))


def test_auto_is_plain_where_the_pins_fill_the_world() -> None:
    """An axis that came after the recipe was written must not change what tensor, pipeline and data
    mean there."""
    filled, half, open_ = (
        problem_of(tensor=2, pipeline=2, data=2),
        problem_of(tensor=2, pipeline=2, data=1),
        problem_of(),
    )
    assert [is_world_pinned(p) for p in (filled, half, open_)] == [True, False, False]
    assert choices(RING, wider(filled, None), {}) == (1,)
    assert (
        choices(RING, wider(half, None), {}) == choices(RING, wider(open_, None), {}) == (1, 2, 4)
    )
    assert choices(RING, wider(filled, 2), {}) == (
        2,
    )  # a pin stands, and the rules say what is wrong with it
    # A setting changes neither the world nor the meaning of a degree: it is searched all the same.
    assert choices(axis_named("zero_stage"), filled, {}) == axes.ZERO_STAGES


def test_a_new_row_is_searched_printed_and_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(axes, "AXES", (RING, *AXES))
    strategy = WiderStrategy(**{f.name: getattr(GOOD, f.name) for f in fields(Layout)}, ring=2)
    assert strategy.world_size == 16 and strategy.degrees()["ring"] == 2
    assert strategy.describe() == f"{GOOD.describe()} ring=2" and strategy.pins()["ring"] == 2
    assert complexity_features(strategy) == {*complexity_features(GOOD), "a ring"}
    rings = {degrees["ring"] for degrees in world_factorizations(wider(problem_of(), None))}
    assert rings == {1, 2, 4}
    assert {
        degrees["ring"]
        for degrees in world_factorizations(wider(problem_of(tensor=2, pipeline=2), 2))
    } == {2}

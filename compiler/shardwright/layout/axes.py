"""Define the table of layout axes: one row for each field of Layout.

Everything that lists, prints, pins, compares or searches layouts reads this table. Rows stand in
search order: first the degrees whose product is the world size, with data last because it takes
what the others leave. The settings follow, with the micro-batch last, so memory only grows along
it. Printed output follows the order of Layout's fields.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from shardwright.layout.gpu_cluster import Cluster
from shardwright.layout.planning_problem import Problem
from shardwright.models.expert_modules import expert_modules
from shardwright.models.model_graph import ModelGraph
from shardwright.recipe.literal_types import (
    CHECKPOINTING,
    OFFLOAD,
    SCHEDULES,
    PartialCheckpointing,
    RecomputedModules,
)
from shardwright.recipe.recipe_types import Recipe
from shardwright.utils.divisors import context_degrees, divisors

ZERO_STAGES = (0, 1, 2, 3)
MAX_VIRTUAL_STAGES = 8  # v stages divide the bubble by v and multiply the messages by v
MAX_MICRO_BATCH = 64  # larger ones gain nothing: the matrix products are saturated before

Word = int | str
Value = Word | PartialCheckpointing | RecomputedModules
Degrees = Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Axis:
    """Describe one field of Layout.

    name: the field, and the recipe's key where there is one
    section: the recipe's section; "" where the value follows from other rows
    default: the recipe's default; None means auto
    off_value: the value of a layout that does not use this axis
    ranks: the world size is the product of these degrees
    affects_rank_state: decides which rank holds which part of the model and of the optimizer
    rank_order: place among the axes that tell ranks apart, from the slowest (1), as in DeepSpeed's
        PipeModelDataParallelTopology, whose data ranks are data x context ranks here
    is_model_parallel: with any value but off_value, no rank holds the whole model
    is_in_layer: with any value but off_value, each layer waits for this axis's collectives
    values: what a search tries where the recipe says auto, given the degrees chosen so far (an
        empty mapping asks for the values that any cluster could have); None: only off_value
    is_allowed: a further condition on a value, a pinned one included; a pin that breaks a rule is
        kept, and the rule reports why
    off_when_world_pinned: auto means off_value where tensor, pipeline and data are pinned and fill
        the world (see `choices`)
    has_cost_model: the cost model covers this axis
    in_every_engine: every engine supports it; each engine's row lists the other axes that it
        supports
    splits_results: `plan` reports rejected layouts separately for each value of this axis
    abbreviation: the column head in a table
    letters: the short form in a line such as "TP 2, PP 4, DP 16, ZeRO-1", with {} for the value
    always_in_letters: the line has it at its off value, too
    table_label: the note beside a row of a table, with {} for the value
    feature: the name in a list of what a layout needs beyond data parallelism and ZeRO, with {} for
        the value
    """

    name: str
    off_value: Word = 1
    section: str = "parallelism"
    default: Word | None = None
    ranks: bool = False
    rank_order: int = 0
    affects_rank_state: bool = False
    is_model_parallel: bool = False
    is_in_layer: bool = False
    values: Callable[[Problem, Degrees], Iterable[Value]] | None = None
    is_allowed: Callable[[Problem, Degrees, Value], bool] | None = None
    off_when_world_pinned: bool = False
    has_cost_model: bool = True
    in_every_engine: bool = True
    splits_results: bool = False
    abbreviation: str = ""
    letters: str = ""
    always_in_letters: bool = False
    table_label: str = ""
    feature: str = ""

    @property
    def is_auto_by_default(self) -> bool:
        """Return whether every engine's search chooses this axis when the recipe leaves it out."""
        return self.values is not None and self.default is None and self.in_every_engine

    def pin(self, recipe: Recipe) -> Value | None:
        """Return the recipe's value, or None where the recipe has no such key or leaves it to
        the search."""
        value: Value | None = (
            getattr(getattr(recipe, self.section), self.name) if self.section else None
        )
        return None if value == "auto" else value


AXES: tuple[Axis, ...] = (
    Axis(
        name="tensor",
        ranks=True,
        rank_order=4,
        affects_rank_state=True,
        is_model_parallel=True,
        is_in_layer=True,
        values=lambda problem, degrees: tensor_degrees(problem.cluster),
        splits_results=True,
        abbreviation="TP",
        letters="TP {}",
        feature="tensor parallelism",
    ),
    Axis(
        name="pipeline",
        ranks=True,
        rank_order=1,
        affects_rank_state=True,
        is_model_parallel=True,
        values=lambda problem, degrees: range(1, len(problem.graph.layers) + 1),
        splits_results=True,
        abbreviation="PP",
        letters="PP {}",
        feature="a pipeline",
    ),
    Axis(
        name="context",
        ranks=True,
        rank_order=3,
        affects_rank_state=True,
        is_in_layer=True,
        values=lambda problem, degrees: context_degrees(
            problem.recipe.training.sequence_length, problem.cluster.scale_up_gpus
        ),
        off_when_world_pinned=True,
        in_every_engine=False,
        abbreviation="CP",
        letters="CP {}",
        feature="context parallelism",
    ),
    Axis(
        name="data",
        ranks=True,
        rank_order=2,
        affects_rank_state=True,
        values=lambda problem, degrees: divisors(problem.recipe.training.global_batch_size),
        abbreviation="DP",
        letters="DP {}",
        always_in_letters=True,
    ),
    Axis(
        name="expert",
        affects_rank_state=True,
        is_model_parallel=True,
        is_in_layer=True,
        values=lambda problem, degrees: expert_degrees(
            problem.graph, _expert_ranks(problem, degrees)
        ),
        off_when_world_pinned=True,
        in_every_engine=False,
        abbreviation="EP",
        letters="EP {}",
        feature="expert parallelism",
    ),
    Axis(
        name="expert_tensor",
        off_value="tensor",
        default="tensor",
        affects_rank_state=True,
        values=lambda problem, degrees: (
            ("tensor", 1)
            if degrees["tensor"] > 1 and expert_modules(problem.graph)
            else ("tensor",)
        ),
        off_when_world_pinned=True,
        in_every_engine=False,
        letters="ETP {}",
        table_label="expert-tensor {}",
        feature="expert-tensor ranks",
    ),
    Axis(
        name="virtual_stages",
        default=1,
        affects_rank_state=True,
        values=lambda problem, degrees: virtual_stages(
            len(problem.graph.layers), degrees["pipeline"]
        ),
        off_when_world_pinned=True,
        in_every_engine=False,
        letters="VPP {}",
        table_label="{} virtual stages",
        feature="virtual stages",
    ),
    Axis(
        name="sequence_parallel",
        off_value=False,
        default=False,
        values=lambda problem, degrees: (False, True) if degrees["tensor"] > 1 else (False,),
        off_when_world_pinned=True,
        in_every_engine=False,
        letters="SP",
        table_label="sequence parallel",
        feature="sequence parallelism",
    ),
    Axis(  # never searched: deepep needs a package that a plan cannot know of
        name="expert_dispatcher",
        off_value="alltoall",
        in_every_engine=False,
        letters="{}",
        table_label="{}",
        feature="{}",
    ),
    Axis(
        name="expert_overlap",
        off_value=False,
        in_every_engine=False,
        letters="EP overlap",
        table_label="expert overlap",
        feature="overlapped expert exchange",
    ),
    Axis(
        name="zero_stage",
        affects_rank_state=True,
        values=lambda problem, degrees: ZERO_STAGES,
        splits_results=True,
        letters="ZeRO-{}",
        always_in_letters=True,
    ),
    Axis(
        name="offload",
        off_value="none",
        default="none",
        affects_rank_state=True,
        # `auto` does not offload where the recipe gives no size of host memory.
        values=lambda problem, degrees: (
            OFFLOAD if problem.cluster.host_memory_bytes else OFFLOAD[:1]
        ),
        letters="offload-{}",
        table_label="offload {}",
        feature="offload",
    ),
    Axis(
        name="schedule",
        off_value="1f1b",
        affects_rank_state=True,
        values=lambda problem, degrees: SCHEDULES if degrees["pipeline"] > 1 else SCHEDULES[:1],
        letters="{}",
        table_label="{}",
        feature="{}",
    ),
    Axis(
        name="activation_checkpointing",
        off_value="none",
        # {full: N} and lists of modules: search/layout_resolution.py
        values=lambda problem, degrees: CHECKPOINTING,
        letters="{}",
    ),
    Axis(
        name="micro_batch_size",
        values=lambda problem, degrees: micro_batches(problem, degrees),
        is_allowed=lambda problem, degrees, micro_batch: (
            problem.recipe.training.global_batch_size % (degrees["data"] * as_int(micro_batch)) == 0
        ),
        letters="MBS {}",
    ),
    Axis(name="gradient_accumulation_steps", section=""),
    Axis(name="loss", off_value="full", section="model"),  # auto is resolved after the layout
    Axis(name="hpz_partition_size", section="", table_label="hpZ"),
)


def _expert_ranks(problem: Problem, degrees: Degrees) -> int:
    """Return how many ranks of a stage can hold experts.

    Tensor ranks count only where each can hold unsharded experts.
    """
    are_experts_sharded = problem.recipe.parallelism.expert_tensor == "tensor"
    return degrees["data"] * degrees["context"] * (1 if are_experts_sharded else degrees["tensor"])


def micro_batches(problem: Problem, degrees: Degrees) -> Iterable[int]:
    """Return the micro-batch sizes to try (sequences).

    A contrastive loss needs the whole batch at once, so each rank has one size only.
    """
    if problem.graph.task_traits.compares_pairs:
        return (max(1, problem.recipe.training.global_batch_size // degrees["data"]),)
    return range(1, MAX_MICRO_BATCH + 1)


def virtual_stages(layers: int, pipeline: int) -> range:
    """Return the numbers of virtual stages of a pipeline rank that leave each stage a layer."""
    return range(1, 1 + (min(MAX_VIRTUAL_STAGES, layers // pipeline) if pipeline > 1 else 1))


def value_text(value: Value) -> str:
    """Format an axis's value as in a recipe."""
    return f"[{', '.join(value)}]" if isinstance(value, tuple) else str(value)


def as_int(value: Value | None) -> int:
    """Return a degree or a count as an int; the schema has checked it."""
    assert isinstance(value, int)
    return value


def axis_named(name: str) -> Axis:
    """Return the row of an axis by its name."""
    return next(axis for axis in AXES if axis.name == name)


def rank_axes() -> tuple[Axis, ...]:
    """Return the axes whose degrees multiply to the world size; data is the last."""
    return tuple(axis for axis in AXES if axis.ranks)


def rank_order_axes() -> tuple[Axis, ...]:
    """Return the axes that tell ranks apart; neighbouring ranks differ in the last."""
    return tuple(
        sorted((axis for axis in AXES if axis.rank_order), key=lambda axis: axis.rank_order)
    )


def rank_coordinates(degrees: Degrees) -> Iterator[dict[str, int]]:
    """Yield every rank's coordinates along rank_order_axes(), in rank order."""
    names = [axis.name for axis in rank_order_axes()]
    for at in itertools.product(*(range(degrees[name]) for name in names)):
        yield dict(zip(names, at, strict=True))


def world_size_of(degrees: Degrees) -> int:
    """Return the number of ranks that these degrees make up."""
    return math.prod(degrees[axis.name] for axis in rank_axes())


def is_world_pinned(problem: Problem) -> bool:
    """Return whether the recipe's tensor, pipeline and data degrees multiply to the world size."""
    pins = [
        axis.pin(problem.recipe) for axis in AXES if axis.ranks and not axis.off_when_world_pinned
    ]
    return None not in pins and math.prod(map(as_int, pins)) == problem.cluster.world_size


def choices(axis: Axis, problem: Problem, degrees: Degrees) -> tuple[Value, ...]:
    """Return the values that a layout of these degrees can have along an axis, or only the pin.

    Where tensor, pipeline and data are pinned and multiply to the world size, an axis with
    `off_when_world_pinned` keeps its off value: `auto` must not change what these pins mean. The
    search chooses everything else.
    """
    pin = axis.pin(problem.recipe)
    if pin is not None:
        values: Iterable[Value] = (pin,)
    elif axis.values is None or (axis.off_when_world_pinned and is_world_pinned(problem)):
        values = (axis.off_value,)
    else:
        values = axis.values(problem, degrees)
    return tuple(
        v for v in values if axis.is_allowed is None or axis.is_allowed(problem, degrees, v)
    )


def world_factorizations(problem: Problem) -> Iterator[dict[str, int]]:
    """Yield every choice of degrees whose product is the world size, pins respected."""

    def extend(index: int, ranks_left: int, chosen: dict[str, int]) -> Iterator[dict[str, int]]:
        axis = axes[index]
        degrees = [as_int(v) for v in choices(axis, problem, {})]
        if index == len(axes) - 1:
            if ranks_left in degrees:
                yield {**chosen, axis.name: ranks_left}
            return
        for degree in degrees:
            if ranks_left % degree == 0:
                yield from extend(index + 1, ranks_left // degree, {**chosen, axis.name: degree})

    axes = rank_axes()
    return extend(0, problem.cluster.world_size, {})


def reachable_world_sizes(problem: Problem) -> set[int]:
    """Return every number of GPUs that some choice of degrees makes up."""
    sizes = {1}
    for axis in rank_axes():
        sizes = {size * as_int(degree) for size in sizes for degree in choices(axis, problem, {})}
    return sizes


MAX_TENSOR_RANKS = 16
"""Limits what a search tries beyond a node; a pin may exceed it. Published runs have 8 at most."""


def tensor_degrees(cluster: Cluster) -> tuple[int, ...]:
    """Return the tensor degrees whose groups stay inside a node or an NVLink domain."""
    most = max(cluster.gpus_per_node, MAX_TENSOR_RANKS)
    return tuple(t for t in divisors(cluster.scale_up_gpus) if t <= most)


MAX_EXPERT_RANKS = 64
"""Limits what a search tries; a pin may exceed it. DeepSeek-V3 (arXiv 2412.19437) trained with
64, the most of any published run."""


def expert_degrees(graph: ModelGraph, ranks: int) -> tuple[int, ...]:
    """Return the expert-parallel degrees that divide `ranks` and the experts of every layer."""
    counts = expert_modules(graph).values()
    return (
        tuple(e for e in divisors(math.gcd(*counts, ranks)) if e <= MAX_EXPERT_RANKS)
        if counts
        else (1,)
    )

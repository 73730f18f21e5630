"""The one table of axes: all that a layout decides, a row a field of Strategy.

What lists, prints, pins, compares or searches layouts reads this table. Rows stand in the order in
which a search settles them: the degrees whose product is the world, data the last (it takes what
the others leave), then the settings, the micro-batch the last, so that memory only grows along it.
Printed they come in the order of Strategy's fields.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from shardwright.layout.planning_problem import Problem
from shardwright.models.expert_modules import expert_modules
from shardwright.models.model_graph import ModelGraph
from shardwright.recipe.literal_types import CHECKPOINTING, OFFLOAD, SCHEDULES, PartialCheckpointing
from shardwright.recipe.recipe_types import Recipe
from shardwright.utils.divisors import context_degrees, divisors

ZERO_STAGES = (0, 1, 2, 3)
MOST_VIRTUAL_STAGES = 8  # the bubble is divided by them, and each sends as much as one
LARGEST_MICRO_BATCH = 64  # larger ones gain nothing: the matrices are full long before

Word = int | str
Value = Word | PartialCheckpointing
Degrees = Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Axis:
    """One field of Strategy.

    name: of the field, and of the recipe's key where there is one. section: of the recipe ("" where
    it follows from
        the other rows). default: the recipe's; None is auto.
    plain: the value of a layout that does without it. ranks: the world is the product of these
    degrees. holds: decides which rank holds what of model and optimizer. order: of those that tell
    ranks apart, the place from the slowest (1), as in DeepSpeed's
        PipeModelDataParallelTopology, whose data ranks are data x context ranks here.
    cuts: beyond plain no rank has the whole model. inside: beyond plain a layer waits for its
    collectives. values: what a search tries for a problem where the recipe says auto and the engine
    has the axis, the degrees
        being settled (none of them where a degree itself is asked for: then all that any cluster
        could have). None: nothing but plain.
    admits: what else is required of a value, a pinned one too; a pin stands though the rules forbid
    it, and they say
        why.
    yields: where tensor, pipeline and data are pinned and fill the world, `auto` means plain
    (`choices`). priced: the cost model knows it. runs: every engine has it; of the other axes an
    engine's row names those it has. region: layouts that differ here are told apart where `plan`
    says what lost. short: at the head of a table. note: sets a row of a table apart, {} being the
    value; machinery: the same in a list
        of what a layout needs beyond data parallelism and ZeRO.
    """

    name: str
    plain: Word = 1
    section: str = "parallelism"
    default: Word | None = None
    ranks: bool = False
    order: int = 0
    holds: bool = False
    cuts: bool = False
    inside: bool = False
    values: Callable[[Problem, Degrees], Iterable[Value]] | None = None
    is_allowed: Callable[[Problem, Degrees, Value], bool] | None = None
    off_when_world_pinned: bool = False
    priced: bool = True
    runs: bool = True
    region: bool = False
    short: str = ""
    note: str = ""
    feature: str = ""

    @property
    def is_auto_by_default(self) -> bool:
        """A search settles it in a recipe that does not speak of it, under every engine."""
        return self.values is not None and self.default is None and self.runs

    def pin(self, recipe: Recipe) -> Value | None:
        """None where the recipe leaves it to the search, or has no key for it."""
        value: Value | None = (
            getattr(getattr(recipe, self.section), self.name) if self.section else None
        )
        return None if value == "auto" else value


AXES: tuple[Axis, ...] = (
    Axis(
        name="tensor",
        ranks=True,
        order=4,
        holds=True,
        cuts=True,
        inside=True,
        values=lambda problem, degrees: divisors(
            problem.cluster.gpus_per_node
        ),  # a group stands inside a node
        region=True,
        short="TP",
        feature="tensor parallelism",
    ),
    Axis(
        name="pipeline",
        ranks=True,
        order=1,
        holds=True,
        cuts=True,
        values=lambda problem, degrees: range(1, len(problem.graph.layers) + 1),
        region=True,
        short="PP",
        feature="a pipeline",
    ),
    Axis(
        name="context",
        ranks=True,
        order=3,
        holds=True,
        inside=True,
        values=lambda problem, degrees: context_degrees(
            problem.recipe.training.sequence_length, problem.cluster.gpus_per_node
        ),
        off_when_world_pinned=True,
        runs=False,
        short="CP",
        feature="context parallelism",
    ),
    Axis(
        name="data",
        ranks=True,
        order=2,
        holds=True,
        values=lambda problem, degrees: divisors(problem.recipe.training.global_batch_size),
        short="DP",
    ),
    Axis(
        name="expert",
        holds=True,
        cuts=True,
        inside=True,
        values=lambda problem, degrees: expert_degrees(
            problem.graph, _expert_ranks(problem, degrees)
        ),
        off_when_world_pinned=True,
        runs=False,
        short="EP",
        feature="expert parallelism",
    ),
    Axis(
        name="expert_tensor",
        plain="tensor",
        default="tensor",
        holds=True,
        values=lambda problem, degrees: (
            ("tensor", 1)
            if degrees["tensor"] > 1 and expert_modules(problem.graph)
            else ("tensor",)
        ),
        off_when_world_pinned=True,
        runs=False,
        note="expert-tensor {}",
        feature="expert-tensor ranks",
    ),
    Axis(
        name="virtual_stages",
        default=1,
        holds=True,
        values=lambda problem, degrees: virtual_stages(
            len(problem.graph.layers), degrees["pipeline"]
        ),
        off_when_world_pinned=True,
        runs=False,
        note="{} virtual stages",
        feature="virtual stages",
    ),
    Axis(
        name="sequence_parallel",
        plain=False,
        default=False,
        values=lambda problem, degrees: (False, True) if degrees["tensor"] > 1 else (False,),
        off_when_world_pinned=True,
        runs=False,
        note="sequence parallel",
        feature="sequence parallelism",
    ),
    Axis(
        name="zero_stage",
        holds=True,
        values=lambda problem, degrees: ZERO_STAGES,
        region=True,
    ),
    Axis(
        name="offload",
        plain="none",
        default="none",
        holds=True,
        # `auto` never offloads into memory whose size it is not told.
        values=lambda problem, degrees: (
            OFFLOAD if problem.cluster.host_memory_bytes else OFFLOAD[:1]
        ),
        note="offload {}",
        feature="offload",
    ),
    Axis(
        name="schedule",
        plain="1f1b",
        holds=True,
        values=lambda problem, degrees: SCHEDULES if degrees["pipeline"] > 1 else SCHEDULES[:1],
        note="{}",
        feature="{}",
    ),
    Axis(
        name="activation_checkpointing",
        plain="none",
        values=lambda problem, degrees: CHECKPOINTING,  # {full: N}: see search/layout_resolution.py
    ),
    Axis(
        name="micro_batch_size",
        values=lambda problem, degrees: micro_batches(problem, degrees),
        is_allowed=lambda problem, degrees, micro_batch: (
            problem.recipe.training.global_batch_size % (degrees["data"] * as_int(micro_batch)) == 0
        ),
    ),
    Axis(name="gradient_accumulation_steps", section=""),
    Axis(name="loss", plain="full", section="model"),  # auto: settled once the layout is
    Axis(name="hpz_partition_size", section="", note="hpZ"),
)


def _expert_ranks(problem: Problem, degrees: Degrees) -> int:
    """Ranks that expert ranks may be taken out of: those of a stage, where tensor ranks can hold
    whole experts."""
    cut = problem.recipe.parallelism.expert_tensor == "tensor"
    return degrees["data"] * degrees["context"] * (1 if cut else degrees["tensor"])


def micro_batches(problem: Problem, degrees: Degrees) -> Iterable[int]:
    """A contrastive loss is of the whole batch: a rank takes its share at once."""
    if problem.graph.task_traits.compares_pairs:
        return (max(1, problem.recipe.training.global_batch_size // degrees["data"]),)
    return range(1, LARGEST_MICRO_BATCH + 1)


def virtual_stages(layers: int, pipeline: int) -> range:
    """Those of a pipeline rank that leave each stage a layer."""
    return range(1, 1 + (min(MOST_VIRTUAL_STAGES, layers // pipeline) if pipeline > 1 else 1))


def as_int(value: Value | None) -> int:
    """A degree or a count, which the schema has checked."""
    assert isinstance(value, int)
    return value


def axis_named(name: str) -> Axis:
    return next(axis for axis in AXES if axis.name == name)


def rank_axes() -> tuple[Axis, ...]:
    """Those whose degrees make up the world; data is the last."""
    return tuple(axis for axis in AXES if axis.ranks)


def rank_order_axes() -> tuple[Axis, ...]:
    """Those that tell ranks apart; neighbouring ranks differ in the last."""
    return tuple(sorted((axis for axis in AXES if axis.order), key=lambda axis: axis.order))


def rank_coordinates(degrees: Degrees) -> Iterator[dict[str, int]]:
    """Of every rank, in order, along each of rank_order_axes()."""
    names = [axis.name for axis in rank_order_axes()]
    for at in itertools.product(*(range(degrees[name]) for name in names)):
        yield dict(zip(names, at, strict=True))


def world_size_of(degrees: Degrees) -> int:
    return math.prod(degrees[axis.name] for axis in rank_axes())


def is_world_pinned(problem: Problem) -> bool:
    """Whether the recipe itself says how tensor, pipeline and data share out all of the GPUs."""
    pins = [
        axis.pin(problem.recipe) for axis in AXES if axis.ranks and not axis.off_when_world_pinned
    ]
    return None not in pins and math.prod(map(as_int, pins)) == problem.cluster.world_size


def choices(axis: Axis, problem: Problem, degrees: Degrees) -> tuple[Value, ...]:
    """The values that a layout of these degrees can have along an axis: the pin, where there is
    one.

    The rule for `auto`: where tensor, pipeline and data are pinned and multiply to the world, an
    axis that would change the world or the meaning of these pins (`yields`) stands at its plain
    value. Everything else the search settles.
    """
    pin = axis.pin(problem.recipe)
    if pin is not None:
        found: Iterable[Value] = (pin,)
    elif axis.values is None or (axis.off_when_world_pinned and is_world_pinned(problem)):
        found = (axis.plain,)
    else:
        found = axis.values(problem, degrees)
    return tuple(
        v for v in found if axis.is_allowed is None or axis.is_allowed(problem, degrees, v)
    )


def world_factorizations(problem: Problem) -> Iterator[dict[str, int]]:
    """Every choice of the degrees whose product is the world, pins respected."""

    def below(place: int, left: int, settled: dict[str, int]) -> Iterator[dict[str, int]]:
        axis, found = axes[place], [as_int(v) for v in choices(axes[place], problem, {})]
        if place == len(axes) - 1:
            found = [left] if left in found else []
        for degree in found:
            if left % degree == 0:
                deeper = {**settled, axis.name: degree}
                if place == len(axes) - 1:
                    yield deeper
                else:
                    yield from below(place + 1, left // degree, deeper)

    axes = rank_axes()
    return below(0, problem.cluster.world_size, {})


def reachable_world_sizes(problem: Problem) -> set[int]:
    """Every number of GPUs that some degrees make up."""
    found = {1}
    for axis in rank_axes():
        found = {world * as_int(degree) for world in found for degree in choices(axis, problem, {})}
    return found


MAX_EXPERT_RANKS = 64
"""That a search tries; DeepSeek-V3's (arXiv 2412.19437), the most that a published training run
had. A pin may more."""


def expert_degrees(graph: ModelGraph, ranks: int) -> tuple[int, ...]:
    """What divides the experts of every layer, and the ranks out of which expert ranks are
    taken."""
    counts = expert_modules(graph).values()
    return (
        tuple(e for e in divisors(math.gcd(*counts, ranks)) if e <= MAX_EXPERT_RANKS)
        if counts
        else (1,)
    )

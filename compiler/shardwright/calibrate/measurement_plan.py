"""What is worth measuring for a recipe: what its search would ask about, the likeliest layouts
first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardwright.cost.calibrated_costs import first_of_kind
from shardwright.cost.layer_shapes import model_shapes
from shardwright.layout.layout import Strategy
from shardwright.layout.layout_estimate import Estimate
from shardwright.layout.planning_problem import Problem
from shardwright.recipe.literal_types import Checkpointing

MOST_PRODUCTS = 24
MOST_TOKENS = 65_536
"""Of a micro-batch that is timed: a larger one is on the same line."""
ATTENTION_LENGTHS = (2048, 4096, 8192, 16_384, 32_768, 65_536)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductShape:
    """(m, k) by (k, n)."""

    m: int
    n: int
    k: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSet:
    """The model's layers at one tensor degree. Micro-batches in the order in which they are worth
    their time."""

    tensor: int
    micro_batches: tuple[int, ...]
    checkpointing: tuple[Checkpointing, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """places: in graph.layers, of the decoder layers that stand for their kind."""

    products: tuple[ProductShape, ...]
    attention: tuple[int, ...]
    layers: tuple[LayerSet, ...]
    zero_stages: tuple[int, ...]
    places: tuple[int, ...]


def wanted(problem: Problem, ranked: Sequence[Estimate]) -> Wanted:
    """ranked: the search's, best first."""
    strategies = [estimate.strategy for estimate in ranked]
    degrees = list(dict.fromkeys(s.tensor for s in strategies)) or [1]
    shapes = model_shapes(problem.graph, 1)
    decoders = {
        first
        for first, kind in zip(first_of_kind(shapes.kind_of), shapes.kind_of, strict=True)
        if kind >= 0
    }
    return Wanted(
        products=tuple(dict.fromkeys(_products(problem, strategies)))[:MOST_PRODUCTS],
        attention=ATTENTION_LENGTHS,
        layers=tuple(
            _layers(problem, [s for s in strategies if s.tensor == t], t) for t in degrees
        ),
        zero_stages=tuple(sorted({s.zero_stage for s in strategies})) or (0,),
        places=tuple(sorted(decoders)),
    )


def _layers(problem: Problem, strategies: Sequence[Strategy], tensor: int) -> LayerSet:
    longest = max(1, MOST_TOKENS // problem.recipe.training.sequence_length)
    sizes = {min(s.micro_batch_size, longest) for s in strategies} or {1}
    kept = tuple(dict.fromkeys(s.checkpointing for s in strategies if not s.sequence_parallel))
    return LayerSet(
        tensor=tensor,
        micro_batches=spread_out(sizes),
        checkpointing=("none", *(k for k in kept if k != "none")),
    )


def spread_out(sizes: Iterable[int]) -> tuple[int, ...]:
    """Four at most: the ends first, for a line needs two, then what lies between them."""
    ordered = sorted(set(sizes))
    if len(ordered) <= 2:
        return tuple(ordered)
    places = (0, len(ordered) - 1, len(ordered) // 2, len(ordered) // 4)
    return tuple(dict.fromkeys(ordered[place] for place in places))


def _products(problem: Problem, strategies: Sequence[Strategy]) -> Iterable[ProductShape]:
    """Of a decoder layer and of the head, as the ranks of these layouts run them."""
    recipe, graph = problem.recipe, problem.graph
    for s in strategies:
        shapes, m = (
            model_shapes(graph, s.tensor),
            min(MOST_TOKENS, s.micro_batch_size * recipe.training.sequence_length),
        )
        for kind in shapes.kinds:
            yield from (ProductShape(m=m, n=p.n, k=p.k) for p in kind.products if p.batch == 1)
        yield ProductShape(m=m, n=shapes.head_width, k=graph.hidden_size)

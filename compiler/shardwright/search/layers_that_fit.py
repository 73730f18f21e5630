"""Bound how many decoder layers each pipeline rank has memory for, before layers are assigned.

Early ranks save more micro-batches, so they hold fewer layers and the others do more work. The
slowest rank's work bounds the step from below (step_time_bound.py).

Shape letters: p pipeline ranks, m micro-batches of a step, L decoder layers that are counted.
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.layer_shapes import model_shapes
from shardwright.cost.layer_times import PassTimes
from shardwright.cost.peak_memory import (
    kept_of_layers,
    least_rank_bytes,
    states_of_layers,
    usable_bytes,
)
from shardwright.cost.priced_layout import PricedLayout, in_flight
from shardwright.layout.layout import Layout
from shardwright.models.model_graph import ModelGraph

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

Mask = NDArray[np.bool_]

ROUNDING = 1e-9
NEARLY_ALL = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSeconds:
    """Holds seconds of one micro-batch, forward and backward.

    least, most: by a rank's number of counted decoder layers: of the shortest ones it can have,
    and of the longest with all that are not counted. each: of each decoder layer. head: of the
    head. total: of all layers. forward_share: the largest share of a layer's seconds that is its
    forward pass. recomputed_layers, recompute_seconds: under partial checkpointing, a rank's
    recomputed layers and the seconds of each, which are in none of the other figures.
    """

    least: Floats
    most: Floats
    each: Floats
    head: float
    total: float
    forward_share: float
    recomputed_layers: int = 0
    recompute_seconds: float = 0.0

    @property
    def layers(self) -> int:
        return len(self.least) - 1

    def recompute_seconds_on(self, layers: Ints) -> Floats:
        """Return the seconds of recomputation, by the number of layers of a rank."""
        found: Floats = np.minimum(layers, self.recomputed_layers) * self.recompute_seconds
        return found


def commonest_layers(graph: ModelGraph) -> Mask | None:
    """Return which decoder layers are of the commonest kind, where a few are of another (dense
    layers before MoE layers). None where all are alike, or no kind makes up nearly all: counting
    the commonest kind alone gives the tighter bound."""
    kinds = np.array(model_shapes(graph, 1).kind_of[1:-1])
    found: Mask = kinds == np.bincount(kinds).argmax()
    return found if NEARLY_ALL <= found.mean() < 1 else None


def seconds_by_layer_count(
    found: PassTimes, counted: Mask | None, *, has_consecutive_layers: bool
) -> LayerSeconds:
    """Sum seconds by the number of layers. counted: mask of the decoder layers that are counted,
    None for all. has_consecutive_layers: a rank's layers are consecutive (not DualPipeV's)."""
    forward = np.add(found.forward_compute, found.forward_comm)
    both = forward + found.backward_compute + found.backward_comm
    each = np.diff(both)
    share = np.diff(forward)[each > 0] / each[each > 0]
    decoders = each[1:-1]
    others = 0.0 if counted is None else float(decoders[~counted].sum())
    return LayerSeconds(
        least=shortest(decoders, counted, has_consecutive_layers=has_consecutive_layers),
        most=others - shortest(-decoders, counted, has_consecutive_layers=has_consecutive_layers),
        each=decoders,
        head=float(each[-1]),
        total=float(both[-1]),
        forward_share=float(share.max(initial=0.0)),
    )


def shortest(each: Floats, counted: Mask | None, *, has_consecutive_layers: bool) -> Floats:
    """Return the least sum of n of the counted entries, for each n."""
    if counted is not None or not has_consecutive_layers:
        chosen = np.sort(each if counted is None else each[counted])
        return np.concatenate([[0.0], np.cumsum(chosen)])
    if len(each) and np.ptp(each) <= 1e-12 * abs(each[0]):
        even: Floats = np.arange(len(each) + 1) * each[0]
        return even
    sums = np.concatenate([[0.0], np.cumsum(each)])
    return np.array([(sums[n:] - sums[: len(sums) - n]).min() for n in range(len(sums))])


class LayersThatFitCache:
    """Caches what several layouts of one problem share."""

    def __init__(self, counted: Mask | None) -> None:
        """Take the mask that seconds_by_layer_count takes."""
        self._counted = counted
        self._states: dict[Hashable, Floats] = {}
        self._kept: dict[Hashable, tuple[Floats, Floats]] = {}

    def of(self, layout: PricedLayout, whole: PricedLayout | None = None) -> LayersThatFit:
        """Return the layers that fit. whole: the same layout with nothing recomputed, to ask
        about partial checkpointing of a layout that recomputes all layers."""
        rank, head = least_rank_bytes(
            layout if whole is None else whole
        )  # with nothing recomputed in the latter
        s = layout.strategy
        free_bytes = np.full(
            (s.pipeline, 1), float(usable_bytes(layout.problem, layout.constants) - rank)
        )
        if (
            layout.recipe.model.loss != "auto"
        ):  # which may take the loss in chunks, so that the head needs less
            free_bytes[head_rank(s)] -= head
        kept, each = self._kept_of(layout)
        unsaved, unsaved_each = (kept, each) if whole is None else self._kept_of(whole)
        return LayersThatFit(
            free_bytes=free_bytes,
            # DualPipeV's returning half has the fewer micro-batches in flight.
            in_flight=np.array([in_flight(s, rank)[-1] for rank in range(s.pipeline)])[:, None],
            states=self._states_of(layout),
            kept=kept,
            saved_without_recompute=unsaved,
            dropped=float((unsaved_each - each).max()),
        )

    def _states_of(self, layout: PricedLayout) -> Floats:
        s = layout.strategy
        key = (
            s.tensor,
            s.expert,
            s.expert_tensor,
            s.zero_world_size,
            s.zero_stage,
            s.offload,
            has_consecutive_layers(s),
        )
        if key not in self._states:
            each = np.diff(states_of_layers(layout))
            self._states[key] = shortest(
                each, self._counted, has_consecutive_layers=has_consecutive_layers(s)
            )
        return self._states[key]

    def _kept_of(self, layout: PricedLayout) -> tuple[Floats, Floats]:
        """Return saved activation bytes: of the smallest n layers, for each n, and of each
        layer."""
        s = layout.strategy
        degrees = (s.tensor, s.context, s.expert, s.expert_tensor)
        key = (
            *degrees,
            layout.sequences,
            s.checkpointing,
            s.sequence_parallel,
            has_consecutive_layers(s),
        )
        if key not in self._kept:
            each = np.diff(kept_of_layers(layout))
            self._kept[key] = (
                shortest(each, self._counted, has_consecutive_layers=has_consecutive_layers(s)),
                each,
            )
        return self._kept[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersThatFit:
    """Says how many counted decoder layers each rank of one layout has memory for, whichever they
    are.

    free_bytes: of each rank (p, 1). in_flight: micro-batches that it saves at once (p, 1).
    states, saved, saved_without_recompute: bytes by the number of layers. dropped: the most that
    recomputing one layer saves.
    """

    free_bytes: Floats
    in_flight: Ints
    states: Floats
    kept: Floats
    saved_without_recompute: Floats
    dropped: float

    @property
    def suffices(self) -> bool:
        """Return whether all layers fit."""
        return suffices(self.most_layers(), len(self.states) - 1)

    def with_more_bytes(self, each: float) -> LayersThatFit:
        """Return the same with `each` more bytes on each rank."""
        return replace(self, free_bytes=self.free_bytes + each)

    def most_layers(self, recomputed: int = 0) -> Ints:
        """Return the layers that each rank has memory for; -1 where not even none fit.
        recomputed: a rank's recomputed layers under partial checkpointing."""
        kept = np.maximum(self.kept, self.saved_without_recompute - recomputed * self.dropped)
        found: Ints = (self.states + self.in_flight * kept <= self.free_bytes).sum(axis=1) - 1
        return found

    def fewest_recomputed(self, most: int, stages: int) -> int:
        """Return the fewest recomputed layers of each of a rank's stages with which all layers
        fit; `most` + 1 where there is no such number."""
        layers = len(self.states) - 1
        return bisect.bisect_left(
            range(most + 1),
            True,
            key=lambda each: suffices(self.most_layers(each * stages), layers),
        )


def head_rank(s: Layout) -> int:
    return 0 if s.ends_share_rank else s.pipeline - 1


def has_consecutive_layers(s: Layout) -> bool:
    """Return whether a rank's layers are consecutive."""
    return s.stages == s.pipeline


def suffices(most: Ints, layers: int) -> bool:
    return bool(most.min() >= 0 and most.sum() >= layers)


def slowest_rank(work: LayerSeconds, most: Ints, head: int) -> tuple[float, int] | None:
    """Return the least seconds of the slowest rank's layers (one micro-batch), and the first
    rank that can take as long. None where the layers do not fit. most: layers that each rank has
    memory for; head: the rank with the head."""
    layers = work.layers
    if not suffices(most, layers):
        return None
    extra = np.zeros(len(most))
    extra[head] = work.head
    least = work.least + work.recompute_seconds_on(np.arange(layers + 1))

    def places_all(seconds: float) -> bool:
        done = np.searchsorted(least, seconds * (1 + ROUNDING) - extra, side="right") - 1
        return suffices(np.minimum(done, most), layers)

    tried = np.sort(np.concatenate([least, least + work.head]))
    slowest = float(tried[bisect.bisect_left(tried, True, key=places_all)])
    held = np.minimum(most, layers)
    longest = work.most[held] + work.recompute_seconds_on(held) + extra
    return slowest, int(np.argmax(longest >= slowest * (1 - ROUNDING)))


def fewest_by_place(layers: int, most: Ints, largest: int) -> Ints | None:
    """Return the fewest layers of the rank with the k-th most layers, for k from 1 on, where the
    first has `largest`. None where the layers do not fit. most: layers that each rank has memory
    for, largest first."""
    held = np.minimum(most, largest)
    if held.min() < 0 or held.sum() < layers:
        return None
    left = layers - (np.cumsum(held) - held)  # by the k - 1 before it
    found: Ints = np.maximum(-(-left // np.arange(len(most), 0, -1)), 0)
    found[0] = largest
    return found

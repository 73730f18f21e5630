"""What memory makes of a pipeline before its layers are placed: early ranks keep more micro-batches, so that they hold
fewer layers and the others do more. What the slowest rank does at least bounds the step (bound.py).

Shape letters: p pipeline ranks, m micro-batches of a step, L decoder layers.
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.layout import Layout, in_flight
from shardwright.cost.memory import kept_of_layers, least_rank_bytes, states_of_layers, usable_bytes
from shardwright.cost.passes import Passes
from shardwright.layout.strategy import Strategy

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSeconds:
    """Seconds of one micro-batch, forward and backward. least, most: by the number of decoder layers in a row (L + 1
    entries), of the shortest such row and of the longest. head: of the head; total: of all layers. forward_share: the
    largest part of a layer's seconds that is its forward pass."""

    least: Floats
    most: Floats
    head: float
    total: float
    forward_share: float

    def with_more(self, layers: int, each: float) -> RowSeconds:
        """With so much more for each of the first layers of a rank."""
        return replace(self, least=self.least + np.minimum(np.arange(len(self.least)), layers) * each)


def work_of(found: Passes) -> RowSeconds:
    forward = np.add(found.forward_compute, found.forward_comm)
    both = forward + found.backward_compute + found.backward_comm
    each = np.diff(both)
    share = np.diff(forward)[each > 0] / each[each > 0]
    decoders = both[1:-1] - both[1]
    return RowSeconds(
        least=shortest_rows(decoders),
        most=-shortest_rows(-decoders),
        head=float(each[-1]),
        total=float(both[-1]),
        forward_share=float(share.max(initial=0.0)),
    )


def shortest_rows(sums: Floats) -> Floats:
    """The least sum of n entries in a row, for each n. sums: prefix sums."""
    each = np.diff(sums)
    if len(each) and np.ptp(each) <= 1e-12 * abs(each[0]):
        even: Floats = np.arange(len(sums)) * each[0]
        return even
    return np.array([(sums[n:] - sums[: len(sums) - n]).min() for n in range(len(sums))])


class Rooms:
    """Of one problem's layouts; what several of them share is worked out once."""

    def __init__(self) -> None:
        self._states: dict[Hashable, Floats] = {}
        self._kept: dict[Hashable, tuple[Floats, Floats]] = {}

    def of(self, layout: Layout, kept_whole: Layout | None = None) -> Room:
        """kept_whole: the same layout with nothing recomputed, to ask about partial checkpointing of a layout that
        recomputes all layers."""
        rank, head = least_rank_bytes(layout if kept_whole is None else kept_whole)  # the latter's makes no layer again
        s = layout.strategy
        room = np.full((s.pipeline, 1), float(usable_bytes(layout.problem, layout.constants) - rank))
        if layout.recipe.model.loss != "auto":  # which may take the loss in chunks, so that the head needs less
            room[head_rank(s)] -= head
        kept, each = self._kept_of(layout)
        whole, whole_each = (kept, each) if kept_whole is None else self._kept_of(kept_whole)
        return Room(
            room=room,
            # DualPipeV's returning half has the fewer micro-batches in flight.
            flights=np.array([in_flight(s, rank)[-1] for rank in range(s.pipeline)])[:, None],
            states=self._states_of(layout),
            kept=kept,
            kept_whole=whole,
            dropped=float((whole_each - each).max()),
        )

    def _states_of(self, layout: Layout) -> Floats:
        s = layout.strategy
        key = (s.tensor, s.expert, s.expert_tensor, s.shards, s.zero_stage, s.offload)
        if key not in self._states:
            self._states[key] = shortest_rows(states_of_layers(layout))
        return self._states[key]

    def _kept_of(self, layout: Layout) -> tuple[Floats, Floats]:
        """Of the shortest rows, and of each layer."""
        s = layout.strategy
        key = (s.tensor, s.context, s.expert, s.micro_batch_size, s.checkpointing, s.sequence_parallel, s.expert_tensor)
        if key not in self._kept:
            sums = kept_of_layers(layout)
            self._kept[key] = shortest_rows(sums), np.diff(sums)
        return self._kept[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Decoder layers that the ranks of one layout have room for, whichever these are.

    room: bytes of each rank (p, 1). flights: micro-batches that it keeps at once (p, 1). states, kept, kept_whole:
    bytes by the number of layers (L + 1). dropped: what recomputing one layer saves at most.
    """

    room: Floats
    flights: Ints
    states: Floats
    kept: Floats
    kept_whole: Floats
    dropped: float

    def most_layers(self, recomputed: int = 0) -> Ints:
        """Of each rank; -1 where it has room for none. recomputed: layers of the rank, of partial checkpointing."""
        kept = np.maximum(self.kept, self.kept_whole - recomputed * self.dropped)
        found: Ints = (self.states + self.flights * kept <= self.room).sum(axis=1) - 1
        return found

    def fewest_recomputed(self, most: int, stages: int) -> int:
        """Of each of a rank's stages; with fewer there is no room for all layers. `most` and one where there is none
        with as many either."""
        layers = len(self.states) - 1
        return bisect.bisect_left(
            range(most + 1), True, key=lambda each: suffices(self.most_layers(each * stages), layers)
        )


def head_rank(s: Strategy) -> int:
    return 0 if s.schedule == "dualpipev" else s.pipeline - 1


def suffices(most: Ints, layers: int) -> bool:
    return bool(most.min() >= 0 and most.sum() >= layers)


def slowest_rank(work: RowSeconds, most: Ints, head: int) -> tuple[float, int] | None:
    """What the slowest rank's layers take at least, of a micro-batch, and the first rank that can take as long. most:
    layers that each rank has room for; head: the rank that has the head. None where there is no room for all layers."""
    layers = len(work.least) - 1
    if not suffices(most, layers):
        return None
    extra = np.zeros(len(most))
    extra[head] = work.head

    def places_all(seconds: float) -> bool:
        done = np.searchsorted(work.least, seconds * (1 + ROUNDING) - extra, side="right") - 1
        return suffices(np.minimum(done, most), layers)

    tried = np.unique(np.concatenate([work.least, work.least + work.head]))
    slowest = float(tried[bisect.bisect_left(tried, True, key=places_all)])
    longest = work.most[np.minimum(most, layers)] + extra
    return slowest, int(np.argmax(longest >= slowest * (1 - ROUNDING)))

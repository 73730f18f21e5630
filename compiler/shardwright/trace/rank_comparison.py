"""Find what slows a step down beyond the plan's figures: a late rank, a slow link, a slow layer.

A collective ends on all of its ranks at about the same time, and begins when the last one comes:
from there on it transfers, and before that the others wait. Clocks of several hosts differ, so they
are set by those ends.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from shardwright.cost.collective_seconds import (
    Group,
    all_reduce_seconds,
    all_to_all_seconds,
    gather_seconds,
    reduce_scatter_seconds,
    send_seconds,
)
from shardwright.cost.layer_times import layer_seconds
from shardwright.cost.priced_layout import PricedLayout
from shardwright.trace.kernel_classes import LINE_LABELS, LINES
from shardwright.trace.plan_comparison import decoder_layers_of, pipeline_rank_of
from shardwright.trace.step_trace import AttentionCall, CollectiveCall, RankTrace

LEAST_SHARE = 0.03
"""A cause that costs less than this share of the step is not reported."""
LATE_OVER_NEXT = 1.5
"""A rank is late where the others wait this many times as long for it as for any other rank."""
SLOW_LAYER_FACTOR = 1.5
SLOW_LINK_FACTOR = 1.5
"""Measured over expected seconds, from which on a layer or a link is reported."""

Span = tuple[float, float]
"""Holds when something begins and ends, seconds."""
CauseKind = Literal["late_rank", "slow_link", "slow_layer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Hold one cause of lost time.

    subject: "rank 3", "ranks 0, 1", "layer 7"
    seconds: lost in a step
    message: what was measured; advice: what to do
    """

    kind: CauseKind
    subject: str
    seconds: float
    message: str
    advice: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchedCollective:
    """Hold one collective as several ranks saw it.

    calls: by place in the list of traces, all by the first one's clock
    """

    calls: dict[int, CollectiveCall]

    @property
    def last_rank(self) -> int:
        return max(self.calls, key=lambda at: self.calls[at].start)

    @property
    def transfer(self) -> CollectiveCall:
        """Return the call of the rank that came last."""
        return self.calls[self.last_rank]

    @property
    def waits(self) -> dict[int, Span]:
        """Return from when to when each other rank waits for the last one."""
        return {
            at: (call.start, min(call.end, self.transfer.start))
            for at, call in self.calls.items()
            if at != self.last_rank
        }


def find_causes(priced: PricedLayout, traces: Sequence[RankTrace]) -> tuple[Cause, ...]:
    """Return the causes, the one that costs most first."""
    step = statistics.fmean(trace.step_seconds for trace in traces)
    matched = match_collectives(traces)
    found = [
        *_late_ranks(traces, matched),
        *_slow_links(priced, traces, matched),
        *(cause for trace in traces for cause in _slow_layers(priced, trace, len(traces) > 1)),
    ]
    worth = [cause for cause in found if cause.seconds >= LEAST_SHARE * step]
    return tuple(sorted(worth, key=lambda cause: -cause.seconds))


def rank_name(traces: Sequence[RankTrace], at: int) -> str:
    rank = traces[at].rank
    return f"rank {at if rank is None else rank}"


def match_collectives(traces: Sequence[RankTrace]) -> list[MatchedCollective]:
    """Pair each collective's calls on several ranks, by group, kind and order within a step.

    A group whose ranks count differently in a step is left out there: the traces were cut
    differently. Sends are not paired: their order differs between ranks.
    """
    lists: dict[tuple[object, ...], dict[int, list[CollectiveCall]]] = defaultdict(dict)
    for at, trace in enumerate(traces):
        for call in trace.collectives:
            if call.line != "send_recv":
                key = (call.step, call.line, call.group, call.ranks)
                lists[key].setdefault(at, []).append(call)
    found = []
    for of_rank in lists.values():
        if len(of_rank) > 1 and len({len(calls) for calls in of_rank.values()}) == 1:
            for together in zip(*of_rank.values(), strict=True):
                found.append(MatchedCollective(calls=dict(zip(of_rank, together, strict=True))))
    offsets = _clock_offsets(traces, found)
    return [
        MatchedCollective(
            calls={
                at: replace(call, start=call.start - offsets[at]) for at, call in one.calls.items()
            }
        )
        for one in found
    ]


def _clock_offsets(
    traces: Sequence[RankTrace], matched: Sequence[MatchedCollective]
) -> list[float]:
    """Return how far each rank's clock is ahead of the first one's, by the ends of collectives.

    Ranks of one host have one clock, unless the ends are further apart than the longest collective.
    """
    offsets = [0.0] * len(traces)
    known, missing = {0}, set(range(1, len(traces)))
    while missing:  # from rank to rank, over the collectives that they share
        for at in sorted(missing):
            differences = [
                one.calls[at].end - one.calls[other].end + offsets[other]
                for one in matched
                if at in one.calls
                for other in one.calls.keys() & known
            ]
            if differences:
                offset = statistics.median(differences)
                longest = max(call.seconds for one in matched for call in one.calls.values())
                is_near = traces[at].host == traces[0].host != "" and abs(offset) < longest
                offsets[at] = 0.0 if is_near else offset
                known.add(at)
                missing.discard(at)
                break
        else:
            break
    return offsets


def covered_seconds(spans: Iterable[Span]) -> float:
    """Return the seconds in at least one of the spans."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(reached, start))
        reached = max(reached, end)
    return total


def busy_seconds(calls: Sequence[CollectiveCall]) -> float:
    """Return how long at least one of the calls runs: those of one group may share the link."""
    return covered_seconds((call.start, call.end) for call in calls)


def _late_ranks(
    traces: Sequence[RankTrace], matched: Sequence[MatchedCollective]
) -> Iterator[Cause]:
    """Yield the rank that the others wait for, unless they wait for any other nearly as long."""
    steps = max(trace.steps for trace in traces)
    waits: dict[int, dict[int, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for one in matched:
        for other, span in one.waits.items():
            waits[one.last_rank][other].append(span)  # several may be under way at once
    waited = {
        at: statistics.fmean(map(covered_seconds, of_rank.values())) / steps
        for at, of_rank in waits.items()
    }
    ranked = sorted(waited.items(), key=lambda item: -item[1])
    if not ranked or (len(ranked) > 1 and ranked[0][1] < LATE_OVER_NEXT * ranked[1][1]):
        return
    at, seconds = ranked[0]
    exposed = statistics.fmean(
        sum(trace.lines[line].seconds for line in {c.transfer.line for c in matched})
        for other, trace in enumerate(traces)
        if other != at
    )
    times = sum(one.last_rank == at for one in matched)
    name, part = rank_name(traces, at), _longer_part(traces, at)
    yield Cause(
        kind="late_rank",
        subject=name,
        seconds=min(seconds, exposed),
        message=f"{name} comes last to {times} of {len(matched)} collectives: in each step the "
        f"other ranks wait {seconds * 1e3:,.1f} ms for it{part}",
        advice=f"look at {name}'s host: other processes, a throttled or faulty device, slow data "
        "loading, or more work than its share",
    )


def _longer_part(traces: Sequence[RankTrace], at: int) -> str:
    """Say which line of the late rank is longer than the other ranks'."""
    others = [trace for other, trace in enumerate(traces) if other != at]
    own = [line for line in LINES if line not in {c.line for c in traces[at].collectives}]
    longer = {
        line: traces[at].lines[line].seconds
        - statistics.fmean(trace.lines[line].seconds for trace in others)
        for line in own
    }
    line = max(longer, key=lambda name: longer[name])
    if longer[line] <= 0:
        return ""
    return f"; its own {LINE_LABELS[line]} takes {longer[line] * 1e3:,.1f} ms longer than theirs"


def _slow_links(
    priced: PricedLayout, traces: Sequence[RankTrace], matched: Sequence[MatchedCollective]
) -> Iterator[Cause]:
    """Yield each group whose transfers take longer than the plan's links would."""
    groups: dict[tuple[object, ...], list[CollectiveCall]] = defaultdict(list)
    for one in matched:
        call = one.transfer
        if expected_seconds(priced, call) is not None:
            groups[call.group, call.ranks, call.line].append(call)
    steps = max(trace.steps for trace in traces)
    for calls in groups.values():
        first = calls[0]
        measured = busy_seconds(calls)
        expected = sum(expected_seconds(priced, call) or 0.0 for call in calls)
        if measured < SLOW_LINK_FACTOR * expected:
            continue
        exposed = statistics.fmean(trace.lines[first.line].seconds for trace in traces)
        moved = sum(call.bus_bytes or 0.0 for call in calls)
        who = f"ranks {_ranks_text(first.ranks)}" if first.ranks else f"{first.size} ranks"
        yield Cause(
            kind="slow_link",
            subject=who,
            seconds=min((measured - expected) / steps, exposed),
            message=f"the link of {who} is slow: {LINE_LABELS[first.line]} reaches "
            f"{moved / measured / 1e9:.3g} GB/s there, and the plan counts on "
            f"{moved / expected / 1e9:.3g} GB/s",
            advice="compare with nccl-tests or `doctor --measure` on these hosts: a cable, an "
            "adapter at a lower rate, NCCL_SOCKET_IFNAME or NCCL_IB_HCA; --calibrate FILE plans "
            "with the measured rate",
        )


def _ranks_text(ranks: Sequence[int]) -> str:
    if len(ranks) <= 8:
        return ", ".join(map(str, ranks))
    return f"{ranks[0]}, {ranks[1]} ... {ranks[-1]} ({len(ranks)})"


def group_of_call(priced: PricedLayout, call: CollectiveCall) -> Group | None:
    """Return where the call's ranks are: neighbours where the trace does not list them."""
    if not call.size or call.size < 2:
        return None
    nodes = Counter(rank // priced.cluster.gpus_per_node for rank in call.ranks)
    inside = max(nodes.values()) if nodes else min(call.size, priced.cluster.gpus_per_node)
    return Group(ranks=call.size, ranks_per_node=inside, fabric=priced.cluster.fabric)


def expected_seconds(priced: PricedLayout, call: CollectiveCall) -> float | None:
    """Return the seconds of this very call over the plan's links; None where its size is unknown
    or the cost model has no formula for its kind."""
    group, moved = group_of_call(priced, call), call.message_bytes
    if group is None or not moved:
        return None
    cluster, c = priced.cluster, priced.constants
    formulas = {
        "all_reduce": all_reduce_seconds,
        "all_gather": gather_seconds,
        "reduce_scatter": reduce_scatter_seconds,
        "all_to_all": all_to_all_seconds,
    }
    if call.line == "send_recv":
        distance = abs(call.ranks[-1] - call.ranks[0]) if call.ranks else 1
        return send_seconds(cluster, c, distance, moved)
    formula = formulas.get(call.line)
    return None if formula is None else formula(cluster, c, group, moved)


# A slow layer: against the other layers of the same rank, in proportion to what the plan expects.


def _slow_layers(priced: PricedLayout, trace: RankTrace, several: bool) -> Iterator[Cause]:
    rank = pipeline_rank_of(priced, trace.rank)
    seconds = layer_spans(priced, trace, rank)
    if len(seconds) < 3:
        return
    names, measured, expected = zip(*seconds, strict=True)
    usual = statistics.median(m / e for m, e in zip(measured, expected, strict=True))
    for name, found, planned in zip(names, measured, expected, strict=True):
        usually = usual * planned
        if found < SLOW_LAYER_FACTOR * usually:
            continue
        where = f" on rank {trace.rank}" if several and trace.rank is not None else ""
        yield Cause(
            kind="slow_layer",
            subject=name,
            seconds=found - usually,
            message=f"{name}{where} takes {found * 1e3:,.1f} ms of a step, and by the other "
            f"layers it should take {usually * 1e3:,.1f} ms",
            advice="look at this layer's module: Python in its forward pass, a kernel that falls "
            "back, more experts or tokens than the others",
        )


def layer_spans(
    priced: PricedLayout, trace: RankTrace, rank: int | None
) -> list[tuple[str, float, float]]:
    """Return (name, measured seconds, relative weight) of a step's layers: those that the trace
    marks, else the spans from one layer's attention to the next one's."""
    weights = _layer_weights(priced, 0 if rank is None else rank)
    if trace.layers:
        known = weights if len(weights) == len(trace.layers) else [1.0] * len(trace.layers)
        return [
            (each.name, each.seconds, weight)
            for each, weight in zip(trace.layers, known, strict=True)
        ]
    if rank is None or len(weights) < 2:
        return []
    spans: dict[int, float] = defaultdict(float)
    for is_backward, run in _whole_passes(trace.attention, decoder_layers_of(priced, rank)):
        for place, (one, after) in enumerate(itertools.pairwise(run)):
            layer = len(run) - 2 - place if is_backward else place
            spans[layer] += (after.start - one.start) / trace.steps
    return [
        (
            f"layer {at} to {at + 1}, from attention to attention,",
            spans[at],
            (weights[at] + weights[at + 1]) / 2,
        )
        for at in sorted(spans)
    ]


def _layer_weights(priced: PricedLayout, rank: int) -> list[float]:
    forward = layer_seconds(
        priced.recipe, priced.graph, priced.cluster.gpu, priced.strategy, priced.constants
    ).forward
    return [
        forward[at + 1] - forward[at]
        for block in priced.ranks[rank]
        for at in range(block.start, block.stop)
        if priced.shapes.kind_of[at] >= 0
    ]


def _whole_passes(
    calls: Sequence[AttentionCall], layers: int
) -> Iterator[tuple[bool, list[AttentionCall]]]:
    """Yield (whether backward, the calls) of each pass over all layers. Where recomputation mixes
    the directions, the forward passes alone are whole; the call after one is a recomputed one."""
    for is_backward, run in itertools.groupby(calls, key=lambda call: call.is_backward):
        listed = list(run)
        if not is_backward and len(listed) == layers + 1:
            listed.pop()
        if layers > 1 and listed and len(listed) % layers == 0:
            for at in range(0, len(listed), layers):
                yield is_backward, listed[at : at + layers]

"""Compute a step's seconds from its first forward pass to its last backward pass.

Uses a closed form where there is one, else simulates many partitions at once; both are exact.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwright.layout.pipeline_simulation import (
    FORWARD,
    Instruction,
    Link,
    instruction_stream,
    link_and_end,
    message_groups,
)
from shardwright.layout.schedules import PIPELINE_SCHEDULES
from shardwright.recipe.literal_types import Schedule

# 1F1B over uneven stages in closed form. Exact, messages included, for at least as many
# micro-batches as stages.
#
# DeepSpeed's schedule is a grid. In step t, stage s runs forward where t + s is even, after an
# exchange with the previous stage, and backward where t + s is odd, after one with the next stage.
# A rank waits for its partner in each exchange. The step is therefore the longest walk through the
# grid. From one step to the next, a walk stays on its stage or crosses to the partner: rightwards
# into its forward pass, leftwards into its backward pass.
#
# - Fill: while t + s <= 2 p - 2 there are no gradients yet, so backward places are empty. Any walk
#   makes p forward passes here: one on each stage that it reaches, the rest on the slowest of
#   those. `_fill` computes the longest walk to each stage.
# - Drain: from t - s = 2 m - 1 on, forward places are empty. This is the fill reversed in time,
#   with forward and backward exchanged.
# - Steady state: staying on a stage costs its forward and backward pass every two steps. The slower
#   of two stages costs more at any time, so the longest walk goes straight to one stage k, stays,
#   and goes straight on.
#
# The step is the maximum over k and over the stages c and e where the walk leaves the fill and
# enters the drain.
Floats = NDArray[np.float64]


def one_f_one_b_step_seconds(
    micro_batches: int, forward: Floats, backward: Floats, send_seconds: float
) -> Floats:
    """Return the seconds of each partition's 1F1B step.

    forward, backward: one micro-batch (partitions, stages)
    send_seconds: one message
    """
    ranks = forward.shape[1]
    if ranks == 1:
        return micro_batches * (forward + backward)[:, 0]
    stage = np.arange(ranks)
    # A message over the boundary after each stage, and over the one before it.
    behind: Floats = np.where(stage < ranks - 1, send_seconds, 0.0)
    before: Floats = np.where(stage > 0, send_seconds, 0.0)
    # Each exchange has a gradient and an activation.
    ahead, back = forward + 2 * before, backward + 2 * behind
    cycle = ahead + back
    entered = _fill(forward, before, behind)
    left = _fill(backward, before, behind) + 2 * behind
    ahead_to, back_to = np.cumsum(ahead, axis=1), np.cumsum(back, axis=1)
    back_below = back_to - back
    rounds = micro_batches - ranks

    # Axes: partition, k, and c or e. A stage c to the left of k leaves c more rounds for k than one
    # to the right; the same holds for e.
    share = stage * cycle[:, :, None]
    lower = stage[:, None] >= stage
    comes_right = (
        np.where(lower, (entered - ahead_to)[:, None, :] + share, -np.inf) + ahead_to[:, :, None]
    )
    leaves_left = np.where(stage[:, None] > stage, (left - back_to)[:, None, :] + share, -np.inf)
    leaves_left += back_below[:, :, None]
    comes_left = _largest_behind(entered + back_to) - back_below
    leaves_right = _largest_behind(ahead_to + left) - ahead_to
    right, left_out = comes_right.max(axis=2), leaves_left.max(axis=2)
    if rounds >= ranks:
        over_top = right + left_out
    else:
        # Stage k runs rounds + c + e - k times, so e is at least k - rounds - c.
        least = np.clip(stage[:, None] - rounds - stage, 0, None)
        reach = np.take_along_axis(
            _largest_behind(leaves_left), np.broadcast_to(least, leaves_left.shape), axis=2
        )
        over_top = (comes_right + reach).max(axis=2)
    walks = (
        right + leaves_right + rounds * cycle,
        comes_left + left_out + rounds * cycle,
        over_top + back + (rounds - stage) * cycle,
        np.where(
            rounds + stage > 0,
            comes_left + ahead + leaves_right + (rounds + stage - 1) * cycle,
            -np.inf,
        ),
    )
    result: Floats = np.max(walks, axis=(0, 2))
    return result


def _fill(forward: Floats, before: Floats, behind: Floats) -> Floats:
    """Return the longest walk of p forward passes that ends on each stage.

    The walk goes up to some stage h, makes the remaining passes on the slowest stage so far, and
    returns through empty places, where an exchange is one message.
    """
    ranks = forward.shape[1]
    stage = np.arange(ranks)
    passes = forward + before
    slowest = np.maximum.accumulate(passes + behind, axis=1)
    reached = np.cumsum(passes, axis=1) + (ranks - 1 - stage) * slowest
    # The way back from h to c crosses the empty places of c + 1 to h.
    empty = np.cumsum(behind)
    return _largest_behind(reached + empty) - empty


def _largest_behind(values: Floats) -> Floats:
    """Return the running maximum from each place to the end of the last axis."""
    result: Floats = np.maximum.accumulate(values[..., ::-1], axis=-1)[..., ::-1]
    return result


# The simulated step as arrays: all partitions and all pipeline ranks at once, level after level.
#
# A level is at most one exchange with each neighbour, and the passes after it. A rank's time after
# a level is the largest of its own and its neighbours' times before it, plus messages and work: a
# max-plus product with a band of three. In the middle of a step two levels repeat, one for each
# direction. Once a round of them adds the same to every rank, all later rounds do, because
# max-plus products keep a common addend. They are then multiplied, not run. A test compares the
# result with pipeline_simulation.

# Differences between ranks below this share of a round are floating-point noise.
REPEAT_TOLERANCE = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeLevels:
    """Hold the levels of a schedule.

    left, right: messages in a row with that neighbour (level, rank); 0 without an exchange
    work: passes after the exchange (level, rank, kind); the kinds are forward and backward, with
        DualPipeV those of phase 0, then of phase 1
    repeat_at: first level of the round that repeats
    round_levels: levels of that round
    repeats: how often the round runs in all
    """

    left: Floats
    right: Floats
    work: Floats
    repeat_at: int = 0
    round_levels: int = 0
    repeats: int = 0


def simulated_step_seconds(
    schedule: Schedule,
    micro_batches: int,
    forward_seconds: Floats,
    backward_seconds: Floats,
    send_seconds: float,
) -> Floats:
    """Return the seconds of each partition's step, simulated level by level.

    forward_seconds, backward_seconds: as in pipeline_simulation.simulate (partitions, stages)
    send_seconds: one message over any boundary
    """
    stages = forward_seconds.shape[1]
    ranks = PIPELINE_SCHEDULES[schedule].ranks(stages)
    if PIPELINE_SCHEDULES[schedule].is_v_shaped:
        halves = (slice(None, ranks), slice(None, ranks - 1, -1))
        kinds = [x[:, half] for half in halves for x in (forward_seconds, backward_seconds)]
    else:
        kinds = [forward_seconds, backward_seconds]
    levels, messages, never = _levels(schedule, ranks, micro_batches)
    seconds = np.stack([kind.T for kind in kinds], axis=1)  # (ranks, kinds, partitions)
    work = np.matmul(levels.work.transpose(1, 0, 2), seconds).transpose(
        1, 0, 2
    )  # (levels, ranks, partitions)
    added = np.empty((len(work), 3, *work.shape[1:]))
    np.add(work[:, None], (messages * send_seconds + never)[..., None], out=added)
    return _run(levels, added)


@functools.lru_cache(maxsize=512)
def _levels(
    schedule: Schedule, ranks: int, micro_batches: int
) -> tuple[ExchangeLevels, Floats, Floats]:
    """Return the levels and two arrays (level, from, rank) about the left, own and right rank.

    The first array counts the messages from there; the second is -inf where a rank does not wait
    for that one, else 0.
    """
    levels = _EXCHANGE_LEVELS[schedule](ranks, micro_batches)
    messages = np.stack([levels.left, np.maximum(levels.left, levels.right), levels.right], axis=1)
    never = np.where(messages > 0, 0.0, -np.inf)
    never[:, 1] = 0.0
    return levels, messages, never


def _run(levels: ExchangeLevels, added: Floats) -> Floats:
    """Run the levels and return the seconds of each partition.

    added: what a level adds to the left neighbour's, the own and the right neighbour's time (level,
        from, rank, partition)
    """
    ranks, partitions = added.shape[2:]
    padded = np.full((ranks + 2, partitions), -np.inf)
    own = padded[1:-1]
    own[:] = 0.0
    around = np.lib.stride_tricks.sliding_window_view(padded, ranks, axis=0).transpose(0, 2, 1)
    reached = np.empty(around.shape)

    def run(start: int, stop: int) -> None:
        for level in range(start, stop):
            np.add(around, added[level], reached)
            np.maximum.reduce(reached, axis=0, out=own)

    first, after = levels.repeat_at, levels.repeat_at + levels.round_levels
    run(0, first)
    for done in range(levels.repeats):
        start = own.copy()
        run(first, after)
        grown = own - start
        if (grown.max(axis=0) - grown.min(axis=0)).max() <= REPEAT_TOLERANCE * own.max():
            own += grown.mean(axis=0) * (levels.repeats - done - 1)
            break
    run(after, len(added))
    result: Floats = own.max(axis=0)
    return result


def one_forward_one_backward_levels(ranks: int, micro_batches: int) -> ExchangeLevels:
    """Return the levels of 1F1B; level t is step t of TrainSchedule.

    Ranks of t's parity run forward after an exchange with the previous rank, the others backward
    after one with the next rank. No round repeats in a step of fewer micro-batches than ranks;
    longer steps have a closed form.
    """
    step, rank = np.arange(2 * (micro_batches + ranks - 1))[:, None], np.arange(ranks)[None, :]
    is_forward = (step + rank) % 2 == 0
    forward = is_forward & (step - rank >= 0) & ((step - rank) // 2 < micro_batches)
    number = (step + rank + 1) // 2 - ranks
    backward = ~is_forward & (number >= 0) & (number < micro_batches)
    # The previous rank runs backward in the same step, and its gradient comes first.
    came_back = np.zeros_like(forward)
    came_back[:, 1:] = is_forward[:, 1:] & backward[:, :-1]
    left = (came_back.astype(float) + forward) * (rank > 0)
    right = np.zeros_like(left)
    right[:, :-1] = left[:, 1:]
    return ExchangeLevels(
        left=left, right=right, work=np.stack([forward, backward], axis=2).astype(float)
    )


def dualpipev_levels(ranks: int, micro_batches: int) -> ExchangeLevels:
    """Return the levels of at most 2 p + 2 micro-batches; each further one adds a round."""
    kept = min(micro_batches, 2 * ranks + 2)
    levels = _of_streams(ranks, kept)
    if kept == micro_batches:
        return levels
    left, right, work = levels.left, levels.right, levels.work
    # A round has each pass once on every rank, and an exchange with each neighbour.
    size = 1 if ranks == 2 else 2
    last = len(work) - 2 * size
    at = next(
        i
        for i in range(last)
        if (work[i : i + size].sum(axis=0) == 1).all()
        and all((x[i : i + size] == x[i + size : i + 2 * size]).all() for x in (left, right, work))
    )
    return dataclasses.replace(
        levels, repeat_at=at, round_levels=size, repeats=micro_batches - kept + 1
    )


@functools.lru_cache(maxsize=64)
def _of_streams(ranks: int, micro_batches: int) -> ExchangeLevels:
    """Build levels from instruction streams: one level for message groups that depend on one
    another."""
    events = [_events(ranks, rank, micro_batches) for rank in range(ranks)]
    together = _UnionFind()
    seen: dict[tuple[Link, int], tuple[int, int]] = {}
    posted: dict[tuple[Link, int], int] = defaultdict(int)
    counts: dict[tuple[int, int], dict[Link, int]] = {}
    for rank, program in enumerate(events):
        for number, (group, _) in enumerate(program):
            event = (rank, number)
            links: dict[Link, int] = defaultdict(int)
            counts[event] = links
            for instruction in group:
                link, end = link_and_end(instruction, rank)
                message = (link, posted[link, end])
                posted[link, end] += 1
                links[link] += 1
                together.join(event, seen.setdefault(message, event))
    members: dict[tuple[int, int], list[int]] = defaultdict(list)
    for event in counts:
        members[together.root(event)].append(event[0])
    level_of, reached = _level_numbers([len(program) for program in events], together, members)
    left, right = np.zeros((reached, ranks)), np.zeros((reached, ranks))
    work = np.zeros((reached, ranks, 4))
    for (rank, number), links in counts.items():
        level = level_of[rank, number]
        work[level, rank] = events[rank][number][1]
        for peer, side in ((rank - 1, left), (rank + 1, right)):
            side[level, rank] = max(links.get((rank, peer), 0), links.get((peer, rank), 0))
    return ExchangeLevels(left=left, right=right, work=work)


def _events(
    ranks: int, rank: int, micro_batches: int
) -> list[tuple[tuple[Instruction, ...], list[int]]]:
    """Return groups of messages, each with the passes after it by kind; the first group is
    empty."""
    out: list[tuple[tuple[Instruction, ...], list[int]]] = [((), [0, 0, 0, 0])]
    for step in message_groups(
        instruction_stream("dualpipev", ranks, rank, micro_batches), "dualpipev"
    ):
        if isinstance(step, Instruction):
            out[-1][1][2 * step.phase + (step.name != FORWARD)] += 1
        elif step:
            out.append((step, [0, 0, 0, 0]))
    return out


def _level_numbers(
    lengths: list[int], together: _UnionFind, members: dict[tuple[int, int], list[int]]
) -> tuple[dict[tuple[int, int], int], int]:
    """Return the level of each event, and the number of levels.

    An event's level is one more than the last of those that it waits for.
    """
    level_of: dict[tuple[int, int], int] = {}
    at, next_level = [0] * len(lengths), [0] * len(lengths)
    arrived: dict[tuple[int, int], int] = defaultdict(int)
    ready = list(range(len(lengths)))
    while ready:
        rank = ready.pop()
        if at[rank] == lengths[rank]:
            continue
        root = together.root((rank, at[rank]))
        arrived[root] += 1
        if arrived[root] == len(members[root]):
            level = max(next_level[r] for r in members[root])
            for r in members[root]:
                level_of[r, at[r]] = level
                at[r], next_level[r] = at[r] + 1, level + 1
            ready += members[root]
    return level_of, max(next_level)


class _UnionFind:
    """Join events that exchange messages."""

    def __init__(self) -> None:
        self._above: dict[tuple[int, int], tuple[int, int]] = {}

    def root(self, event: tuple[int, int]) -> tuple[int, int]:
        above = self._above
        while (next_event := above.get(event)) is not None:
            event = next_event
        return event

    def join(self, a: tuple[int, int], b: tuple[int, int]) -> None:
        first, second = self.root(a), self.root(b)
        if first != second:
            self._above[first] = second


# DualPipeV over more ranks is bounded by its slowest rank: more instruction streams take half a
# second to read.
MAX_SIMULATED_DUALPIPEV_RANKS = 16


def step_seconds_of_partitions(
    schedule: Schedule,
    micro_batches: int,
    forward_seconds: Floats,
    backward_seconds: Floats,
    send_seconds: float,
) -> Floats:
    """Return the seconds of each partition's step.

    forward_seconds, backward_seconds: one micro-batch (partitions, stages), recomputation in the
        backward pass; dualpipev has 2 p stages, whose rank r holds r and 2 p - 1 - r, and at least
        2 p micro-batches
    send_seconds: one message
    """
    if schedule == "1f1b" and micro_batches >= forward_seconds.shape[1]:
        return one_f_one_b_step_seconds(
            micro_batches, forward_seconds, backward_seconds, send_seconds
        )
    return simulated_step_seconds(
        schedule, micro_batches, forward_seconds, backward_seconds, send_seconds
    )


@functools.lru_cache(maxsize=8192)
def step_seconds(
    schedule: Schedule,
    micro_batches: int,
    forward_seconds: tuple[float, ...],
    backward_seconds: tuple[float, ...],
    send_seconds: float,
) -> float:
    """Return the seconds of one partition's step."""
    forward, backward = np.array([forward_seconds]), np.array([backward_seconds])
    return float(
        step_seconds_of_partitions(schedule, micro_batches, forward, backward, send_seconds)[0]
    )


_EXCHANGE_LEVELS: Mapping[Schedule, Callable[[int, int], ExchangeLevels]] = {
    "1f1b": one_forward_one_backward_levels,
    "dualpipev": dualpipev_levels,
}

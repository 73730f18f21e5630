"""Simulate Megatron-Core's interleaved 1F1B pass by pass, from its schedule table.

p ranks hold v model chunks each: chunk c of rank r is part c p + r of the model. Micro-batches
visit the ranks in groups of p (megatron/core/pipeline_parallel/schedules.py, get_schedule_table):
forward pass k of every rank is of chunk (k // p) % v, backward pass k of chunk v - 1 - (k // p) %
v. Rank r makes 2 (p - r - 1) + (v - 1) p forward passes before its first backward pass, then
alternates forward and backward, then makes the remaining backward passes (get_pp_rank_microbatches,
forward_backward_pipelining_with_interleaving). A test compares both with the installed Megatron.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

from shardwright.layout.pipeline_simulation import (
    BACKWARD,
    FORWARD,
    ComputeInterval,
    MessageWait,
    PipelineTimeline,
)

MIN_SIMULATED_GROUPS = 4
MAX_SIMULATED_PASSES = 6000
"""Limits the simulation, after at least MIN_SIMULATED_GROUPS groups of p micro-batches. Later
groups take as long as the last one. With chunks that differ by 5 %, the step is within 1 % of
the full simulation."""


def warmup_forward_passes(ranks: int, rank: int, chunks: int, micro_batches: int) -> int:
    """Return a rank's forward passes before its first one of the steady state."""
    return min(2 * (ranks - rank - 1) + (chunks - 1) * ranks, micro_batches * chunks)


def micro_batches_in_flight(
    ranks: int, rank: int, chunks: int, micro_batches: int
) -> tuple[int, ...]:
    """Return for each chunk of the rank how many micro-batches' activations it has saved at its
    peak.

    The peak is the beginning of the rank's first backward pass.
    """
    passes = min(
        warmup_forward_passes(ranks, rank, chunks, micro_batches) + 1, micro_batches * chunks
    )
    rounds, rest = divmod(passes, ranks * chunks)
    return tuple(
        rounds * ranks + min(ranks, max(0, rest - chunk * ranks)) for chunk in range(chunks)
    )


@functools.lru_cache(maxsize=8192)
def step_seconds(
    ranks: int,
    micro_batches: int,
    forward_seconds: tuple[float, ...],
    backward_seconds: tuple[float, ...],
) -> float:
    """Return the seconds from the first forward pass to the last backward pass.

    forward_seconds, backward_seconds: one micro-batch, by part of the model, messages included
    micro_batches: a multiple of the ranks
    """
    passes_a_group = 2 * ranks * len(forward_seconds)
    groups, all_groups = (
        max(MIN_SIMULATED_GROUPS, MAX_SIMULATED_PASSES // passes_a_group),
        micro_batches // ranks,
    )
    if all_groups <= groups:
        return _makespan(ranks, micro_batches, forward_seconds, backward_seconds)
    shorter, seconds = (
        _makespan(ranks, g * ranks, forward_seconds, backward_seconds) for g in (groups - 1, groups)
    )
    both = [f + b for f, b in zip(forward_seconds, backward_seconds, strict=True)]
    slowest = max(sum(both[rank::ranks]) for rank in range(ranks))
    return seconds + (all_groups - groups) * max(seconds - shorter, ranks * slowest)


def simulate(
    ranks: int,
    micro_batches: int,
    forward: Sequence[float],
    backward: Sequence[float],
    send_seconds: float,
) -> PipelineTimeline:
    """Return the timeline of all micro-batches, as pipeline_simulation.simulate does.

    forward, backward: seconds by part of the model, messages not included
    send_seconds: one message, which follows each pass
    """
    with_send = (
        tuple([x + send_seconds for x in forward]),
        tuple([x + send_seconds for x in backward]),
    )
    program = _run(ranks, micro_batches, *with_send)
    each = [rank.passes() for rank in program]
    return PipelineTimeline(
        seconds=max(rank.now for rank in program),
        ranks=tuple(
            tuple(
                replace(interval, stop_seconds=interval.stop_seconds - send_seconds)
                for interval in intervals
            )
            for intervals in each
        ),
        exchanges=tuple(
            tuple(
                MessageWait(
                    ready_seconds=end - send_seconds,
                    start_seconds=end - send_seconds,
                    stop_seconds=end,
                )
                for end in (interval.stop_seconds for interval in intervals)
            )
            for intervals in each
        ),
    )


def _makespan(
    ranks: int, micro_batches: int, forward: Sequence[float], backward: Sequence[float]
) -> float:
    return max(rank.now for rank in _run(ranks, micro_batches, forward, backward))


def _run(
    ranks: int, micro_batches: int, forward: Sequence[float], backward: Sequence[float]
) -> list[_InterleavedRank]:
    """Run each rank as far as it can go, until all are done."""
    program = [
        _InterleavedRank(
            number=rank,
            ranks=ranks,
            micro_batches=micro_batches,
            forward=forward,
            backward=backward,
        )
        for rank in range(ranks)
    ]
    waiting = list(range(ranks))
    while waiting:
        for rank in waiting:
            program[rank].advance(program[rank - 1].ahead, program[(rank + 1) % ranks].back)
        waiting = [rank for rank in waiting if not program[rank].is_done]
    return program


class _InterleavedRank:
    """Simulate one rank.

    ahead, back: end times of its forward and backward passes, in table order
    """

    def __init__(
        self,
        *,
        number: int,
        ranks: int,
        micro_batches: int,
        forward: Sequence[float],
        backward: Sequence[float],
    ) -> None:
        chunks = len(forward) // ranks
        self.now = 0.0
        self.ahead: list[float] = []
        self.back: list[float] = []
        self._ranks, self._chunks, self._total = ranks, chunks, micro_batches * chunks
        self._first = warmup_forward_passes(ranks, number, chunks, micro_batches)
        self._forward, self._backward = forward[number::ranks], backward[number::ranks]
        self._number, self._leads, self._ends = number, number == 0, number == ranks - 1

    @property
    def is_done(self) -> bool:
        return len(self.back) == self._total

    def advance(self, before: list[float], behind: list[float]) -> None:
        """Run passes until one has to wait.

        before: end times of forward passes on the previous rank, around the ring
        behind: end times of backward passes on the next rank; the same list where there is one rank
        """
        ranks, chunks, total, first = self._ranks, self._chunks, self._total, self._first
        ahead, back, now = self.ahead, self.back, self.now
        while (b := len(back)) < total:
            f = len(ahead)
            if (
                f < total and f - b <= first
            ):  # after the warmup, forward and backward passes alternate
                chunk = f // ranks % chunks
                # The first part of the model waits for none; later ones on the first rank for the
                # ring's last rank.
                needs = f if not self._leads else f - ranks if chunk else -1
                if needs >= len(before):
                    break
                ready = before[needs] if needs >= 0 else 0.0
                now = max(now, ready) + self._forward[chunk]
                ahead.append(now)
            else:
                turn = b // ranks % chunks
                needs = (
                    b if not self._ends else b - ranks if turn else -1
                )  # its own forward pass is through by then
                if needs >= len(behind):
                    break
                ready = behind[needs] if needs >= 0 else 0.0
                now = max(now, ready) + self._backward[chunks - 1 - turn]
                back.append(now)
        self.now = now

    def passes(self) -> list[ComputeInterval]:
        """Return the passes in the order of time."""

        def interval(k: int, end: float, *, is_forward: bool) -> ComputeInterval:
            turn, p = k // self._ranks, self._ranks
            chunk = turn % self._chunks if is_forward else self._chunks - 1 - turn % self._chunks
            return ComputeInterval(
                name=FORWARD if is_forward else BACKWARD,
                stage=chunk * p + self._number,
                micro_batch=turn // self._chunks * p + k % p,
                start_seconds=end - (self._forward if is_forward else self._backward)[chunk],
                stop_seconds=end,
            )

        found = [interval(k, end, is_forward=True) for k, end in enumerate(self.ahead)]
        found += [interval(k, end, is_forward=False) for k, end in enumerate(self.back)]
        return sorted(found, key=lambda each: each.stop_seconds)

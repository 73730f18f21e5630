"""Simulate the planned step: every instruction of every pipeline rank in time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from shardwright.cost.layer_times import pass_times
from shardwright.cost.priced_layout import PricedLayout
from shardwright.cost.step_time import is_simulated, stage_pass_seconds
from shardwright.layout import interleaved_schedule
from shardwright.layout.layout_estimate import Time
from shardwright.layout.pipeline_simulation import FORWARD, PipelineTimeline, simulate
from shardwright.utils.json_values import JsonObject, JsonValue

OUTER = "outer step between islands, a step's share"
KINDS = ("forward", "backward", "messages", "data-parallel collectives", "optimizer", OUTER)
PASS_KINDS = ("forward", "backward")


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineBar:
    """Time one bar.

    kind: index of KINDS
    stage, micro_batch: -1 where the bar is not a pass
    """

    rank: int
    kind: int
    stage: int
    micro_batch: int
    start_seconds: float
    stop_seconds: float

    @property
    def seconds(self) -> float:
        return self.stop_seconds - self.start_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStepTimes:
    """Split one pipeline rank's step; compute and tensor_comm cover forward and backward."""

    compute_seconds: float
    tensor_comm_seconds: float
    messages_seconds: float
    idle_seconds: float
    data_comm_seconds: float
    optimizer_seconds: float
    outer_comm_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeline:
    """Hold the simulated step.

    bars: of every pipeline rank, in order
    ranks: the sums of each rank's bars
    simulated_seconds: end of the last bar
    is_exact: the planner simulates this schedule, so the bars end at its step; else it bounds the
        step
    """

    bars: tuple[TimelineBar, ...]
    ranks: tuple[RankStepTimes, ...]
    simulated_seconds: float
    is_exact: bool


def step_timeline(layout: PricedLayout, time: Time) -> StepTimeline:
    """Holds one optimizer step of one data and tensor rank per pipeline rank.

    time: the plan's. What follows the last pass (the data-parallel collectives that nothing hides,
    the optimizer, the share of an outer step between islands) is the slowest rank's, as in the
    planner's sum.
    """
    s, found = layout.strategy, pass_times(layout)
    forward, backward = stage_pass_seconds(layout, found)
    if s.is_interleaved:
        m = s.gradient_accumulation_steps
        simulated = interleaved_schedule.simulate(
            s.pipeline, m, forward, backward, found.send_seconds
        )
    else:
        sends = [found.send_seconds] * max(0, s.pipeline - 1)
        simulated = simulate(s.schedule, s.gradient_accumulation_steps, forward, backward, sends)
    bars = [bar for rank in range(s.pipeline) for bar in _rank_bars(simulated, rank, time)]
    return StepTimeline(
        bars=tuple(bars),
        ranks=tuple(_sums(layout, simulated, rank, time) for rank in range(s.pipeline)),
        simulated_seconds=simulated.seconds + sum(_after(time)),
        is_exact=is_simulated(s),
    )


def _after(time: Time) -> tuple[float, float, float]:
    """Return the bars after the last pass, of KINDS from 3."""
    return time.data_comm_seconds, time.optimizer_seconds, time.outer_comm_seconds


def _rank_bars(simulated: PipelineTimeline, rank: int, time: Time) -> Iterator[TimelineBar]:
    for interval in simulated.ranks[rank]:
        yield TimelineBar(
            rank=rank,
            kind=0 if interval.name == FORWARD else 1,
            stage=interval.stage,
            micro_batch=interval.micro_batch,
            start_seconds=interval.start_seconds,
            stop_seconds=interval.stop_seconds,
        )
    parts = [(2, e.start_seconds, e.stop_seconds) for e in simulated.exchanges[rank]]
    ends = list(itertools.accumulate(_after(time), initial=simulated.seconds))
    parts += [(3 + place, *span) for place, span in enumerate(itertools.pairwise(ends))]
    for kind, start, stop in parts:
        if stop > start:
            yield TimelineBar(
                rank=rank,
                kind=kind,
                stage=-1,
                micro_batch=-1,
                start_seconds=start,
                stop_seconds=stop,
            )


def _sums(
    layout: PricedLayout, simulated: PipelineTimeline, rank: int, time: Time
) -> RankStepTimes:
    found, m = pass_times(layout), layout.strategy.gradient_accumulation_steps
    busy = sum(i.stop_seconds - i.start_seconds for i in simulated.ranks[rank])
    messages = sum(e.stop_seconds - e.start_seconds for e in simulated.exchanges[rank])
    comm = m * sum(
        sums[block.stop] - sums[block.start]
        for block in layout.ranks[rank]
        for sums in (found.forward_comm, found.backward_comm)
    )
    return RankStepTimes(
        compute_seconds=busy - comm,
        tensor_comm_seconds=comm,
        messages_seconds=messages,
        idle_seconds=max(0.0, simulated.seconds - busy - messages),
        data_comm_seconds=time.data_comm_seconds,
        optimizer_seconds=time.optimizer_seconds,
        outer_comm_seconds=time.outer_comm_seconds,
    )


def sampled_ranks(timeline: StepTimeline, most_bars: int) -> tuple[int, ...]:
    """Return the pipeline ranks to draw with at most `most_bars` bars: all of them, or the first,
    the last and evenly spaced ones between."""
    ranks = len(timeline.ranks)
    kept = max(2, ranks * most_bars // max(1, len(timeline.bars)))
    if kept >= ranks:
        return tuple(range(ranks))
    return tuple(sorted({round(i * (ranks - 1) / (kept - 1)) for i in range(kept)}))


def chrome_trace(timeline: StepTimeline, name: str, step_seconds: float) -> JsonObject:
    """Return the step in the Trace Event Format of chrome://tracing and Perfetto: a thread per
    pipeline rank, in microseconds."""
    events: list[JsonValue] = [_named("process_name", 0, f"{name}: one predicted step")]
    for rank, bars in itertools.groupby(timeline.bars, key=lambda bar: bar.rank):
        events.append(_named("thread_name", rank, f"pipeline rank {rank}"))
        events += [
            {
                "name": KINDS[bar.kind]
                if bar.stage < 0
                else f"{KINDS[bar.kind]} {bar.micro_batch}",
                "cat": KINDS[bar.kind],
                "ph": "X",
                "pid": 0,
                "tid": rank,
                "ts": bar.start_seconds * 1e6,
                "dur": bar.seconds * 1e6,
                "args": {}
                if bar.stage < 0
                else {"stage": bar.stage, "micro_batch": bar.micro_batch},
            }
            for bar in bars
        ]
    return {
        "displayTimeUnit": "ms",
        "otherData": {"step_seconds": step_seconds},
        "traceEvents": events,
    }


def _named(kind: str, rank: int, name: str) -> JsonObject:
    return {"name": kind, "ph": "M", "pid": 0, "tid": rank, "args": {"name": name}}

"""The step of a pipeline: discrete events against the grid of arrays and the closed form, and what
they must say."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.cost.step_time import bubble_divisor
from shardwright.layout.layout import Layout
from shardwright.layout.pipeline_simulation import BACKWARD, FORWARD, PipelineTimeline, simulate
from shardwright.layout.pipeline_step_time import simulated_step_seconds, step_seconds
from shardwright.recipe.literal_types import SCHEDULES, Schedule


def events(
    kind: Schedule, m: int, forward: list[float], backward: list[float], send: float
) -> PipelineTimeline:
    ranks = len(forward) // (2 if kind == "dualpipev" else 1)
    return simulate(kind, m, forward, backward, [send] * (ranks - 1))


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[Schedule, int, list[float], list[float], float]:
    """Uneven stages, even ones and ones with ties; few micro-batches, and enough for rounds that
    repeat."""
    kind = draw(st.sampled_from(SCHEDULES))
    ranks = draw(st.integers(1 if kind == "1f1b" else 2, 7))
    least = 1 if kind == "1f1b" else 2 * ranks
    micro_batches = draw(
        st.sampled_from([least, least + 1, ranks, ranks + 1, 2 * ranks + 3, 4 * ranks + 2])
    )
    stages = ranks if kind == "1f1b" else 2 * ranks
    seconds = draw(st.sampled_from([st.floats(0.01, 3), st.sampled_from([1.0, 2.0]), st.just(1.0)]))
    forward, backward = (
        draw(st.lists(seconds, min_size=stages, max_size=stages)) for _ in range(2)
    )
    return (
        kind,
        max(least, micro_batches),
        forward,
        backward,
        draw(st.sampled_from([0.0, 0.1, 1.5])),
    )


@settings(max_examples=400, deadline=None)
@given(pipelines())
def test_arrays_and_closed_form_are_the_events(
    pipeline: tuple[Schedule, int, list[float], list[float], float],
) -> None:
    kind, m, forward, backward, send = pipeline
    wanted = events(kind, m, forward, backward, send).seconds
    assert simulated_step_seconds(kind, m, np.array([forward]), np.array([backward]), send)[
        0
    ] == pytest.approx(wanted, rel=1e-9)
    assert step_seconds(kind, m, tuple(forward), tuple(backward), send) == pytest.approx(
        wanted, rel=1e-9
    )


@pytest.mark.parametrize(("kind", "micro_batches"), [("1f1b", 300), ("dualpipev", 300)])
@pytest.mark.parametrize("head", [1.0, 1.0001, 1.7])
def test_repeated_rounds_are_exact_to_the_end(
    kind: Schedule, micro_batches: int, head: float
) -> None:
    """Nearly even stages take many rounds until all ranks keep the slowest one's pace."""
    stages = 4 if kind == "1f1b" else 8
    forward = [*[1.0] * (stages - 1), head]
    backward = [2 * x for x in forward]
    wanted = events(kind, micro_batches, forward, backward, 0.01).seconds
    found = simulated_step_seconds(
        kind, micro_batches, np.array([forward]), np.array([backward]), 0.01
    )[0]
    assert found == pytest.approx(wanted, rel=1e-9)


def test_many_partitions_are_each_their_own() -> None:
    forward = np.random.default_rng(1).uniform(0.5, 2, (20, 6))
    cases: list[tuple[Schedule, int]] = [("1f1b", 4), ("1f1b", 40), ("dualpipev", 7)]
    for kind, m in cases:
        together = simulated_step_seconds(kind, m, forward, 2 * forward, 0.1)
        alone = [
            simulated_step_seconds(kind, m, row[None], 2 * row[None], 0.1)[0] for row in forward
        ]
        assert together == pytest.approx(alone, rel=1e-9)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("m", [1, 2, 7, 30])
def test_even_stages(ranks: int, m: int) -> None:
    """(m + p - 1) stages (arXiv 2104.04473), and the messages: two with each neighbour a
    micro-batch."""
    messages = 2 * (ranks - 1) * m if ranks <= 2 or m == 1 else 4 * m + 2 * ranks - 8
    found = step_seconds("1f1b", m, (1.0,) * ranks, (2.5,) * ranks, 0.1)
    assert found == pytest.approx((m + ranks - 1) * 3.5 + messages * 0.1)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("rounds", [2, 8])
def test_dualpipev_bubble_without_simulation(ranks: int, rounds: int) -> None:
    m = rounds * ranks
    strategy = Layout(
        tensor=1,
        pipeline=ranks,
        data=1,
        zero_stage=1,
        micro_batch_size=1,
        gradient_accumulation_steps=m,
        activation_checkpointing="none",
        schedule="dualpipev",
        offload="none",
    )
    closed = 3.0 * m + 3.0 * (ranks - 1) / bubble_divisor(strategy)
    assert step_seconds(
        "dualpipev", m, (0.5,) * 2 * ranks, (1.0,) * 2 * ranks, 0.0
    ) == pytest.approx(closed)


def test_a_heavy_stage_costs_more_at_the_end() -> None:
    """A rank that waits for its first gradient has work to do, the first one the most."""
    stages = [1.0] * 8
    first, last = [1.4, *stages[1:]], [*stages[1:], 1.4]
    steps = [
        step_seconds("1f1b", 16, tuple(s), tuple(2 * x for x in s), 0.0)
        for s in (stages, first, last)
    ]
    assert steps[0] < steps[1] < steps[2]


@pytest.mark.parametrize(("kind", "ranks"), [("1f1b", 4), ("dualpipev", 3)])
def test_the_timeline_is_a_schedule(kind: Schedule, ranks: int) -> None:
    """Every pass once, no two at a time on a rank, each after what it needs and its message."""
    m, send = 9, 0.25
    stages = ranks if kind == "1f1b" else 2 * ranks
    timeline = events(kind, m, [1.0 + s / 10 for s in range(stages)], [2.0] * stages, send)
    done = {}
    for rank, intervals in enumerate(timeline.ranks):
        assert len(intervals) == 2 * m * stages // ranks
        for before, after in itertools.pairwise(intervals):
            assert after.start_seconds >= before.stop_seconds
        for i in intervals:
            assert rank in (i.stage, stages - 1 - i.stage if kind == "dualpipev" else i.stage)
            done[i.name, i.stage, i.micro_batch] = i
    assert timeline.seconds >= max(i.stop_seconds for i in done.values())
    for (name, stage, number), i in done.items():
        if name == FORWARD and stage > 0:
            before = done[FORWARD, stage - 1, number]
        elif name == BACKWARD and stage < stages - 1:
            before = done[BACKWARD, stage + 1, number]
        elif name == BACKWARD:
            before = done[FORWARD, stage, number]
        else:
            continue
        turns = kind == "dualpipev" and {before.stage, i.stage} == {
            ranks - 1,
            ranks,
        }  # the same rank
        wait = 0.0 if turns or before.stage == i.stage else send
        assert i.start_seconds >= before.stop_seconds + wait - 1e-12


def test_blocked_sends_hold_both_ends() -> None:
    """Two ranks, two micro-batches, by hand: rank 0 is ready to send its second activation at 2.1
    and is held until rank 1 has gone back with the first (1 + 0.1 + 1 + 2 = 4.1), for their
    exchange starts with that gradient."""
    timeline = events("1f1b", 2, [1.0, 1.0], [2.0, 2.0], 0.1)
    starts = [[round(i.start_seconds, 9) for i in rank] for rank in timeline.ranks]
    assert starts == [[0.0, 1.1, 4.3, 7.4], [1.1, 2.1, 4.3, 5.3]]
    assert timeline.seconds == pytest.approx(9.4)

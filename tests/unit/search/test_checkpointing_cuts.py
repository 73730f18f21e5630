"""The fastest cut against every cut, in simulation."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.layout.pipeline_simulation import simulate
from shardwright.layout.stage_balancing import (
    balanced_contiguous_boundaries,
    balanced_dualpipev_boundaries,
)
from shardwright.recipe.literal_types import SCHEDULES, Schedule
from shardwright.search import stage_assignment
from shardwright.search.stage_assignment import (
    PipelineBlocks,
    fastest_boundaries,
    fastest_boundaries_where,
)


def row(
    schedule: Schedule,
    m: int,
    stages: int,
    seconds: list[float],
    *,
    ratio: float = 2.0,
    send: float = 0.0,
    after: float = 0.0,
) -> PipelineBlocks:
    """Blocks of these forward seconds; backward is `ratio` times as long, and each takes `after`
    once a step."""
    forward = (0.0, *itertools.accumulate(seconds))
    whole = tuple(max(1, round(x * 1e6)) for x in seconds)
    return PipelineBlocks(
        schedule=schedule,
        micro_batches=m,
        stages=stages,
        forward_seconds=forward,
        backward_seconds=tuple(ratio * x for x in forward),
        per_stage_seconds=(0.0, 0.0),
        send_seconds=send,
        once_per_step_seconds=tuple(after * x for x in range(len(forward))),
        balanced_start=(
            balanced_dualpipev_boundaries
            if schedule == "dualpipev"
            else balanced_contiguous_boundaries
        )(whole, stages),
    )


def simulated(r: PipelineBlocks, cut: tuple[int, ...]) -> float:
    """By the discrete events, apart from the arrays that the search uses."""
    forward, backward = (
        [sums[b] - sums[a] for a, b in itertools.pairwise(cut)]
        for sums in (r.forward_seconds, r.backward_seconds)
    )
    ranks = r.stages // (2 if r.schedule == "dualpipev" else 1)
    after = [
        r.once_per_step_seconds[b] - r.once_per_step_seconds[a] for a, b in itertools.pairwise(cut)
    ]
    if r.schedule == "dualpipev":
        after = [a + b for a, b in zip(after[:ranks], reversed(after), strict=False)]
    return simulate(
        r.schedule, r.micro_batches, forward, backward, [r.send_seconds] * (ranks - 1)
    ).seconds + max(after)


def every_cut(blocks: int, stages: int) -> list[tuple[int, ...]]:
    return [(0, *inner, blocks) for inner in itertools.combinations(range(1, blocks), stages - 1)]


@st.composite
def rows(draw: st.DrawFn) -> PipelineBlocks:
    """Up to 8 layers on up to 4 stages, free ones or a model's: a light embedding, equal layers, a
    head."""
    blocks = draw(st.integers(2, 8))
    schedule = draw(st.sampled_from(SCHEDULES)) if blocks >= 4 else "1f1b"
    stages = 4 if schedule == "dualpipev" else draw(st.integers(2, min(4, blocks)))
    m = draw(st.integers(4 if schedule == "dualpipev" else 1, 12))
    free = st.lists(st.floats(0.05, 2), min_size=blocks, max_size=blocks)
    model = st.floats(0.1, 4).map(lambda head: [0.02, *[1.0] * (blocks - 2), head])
    return row(
        schedule,
        m,
        stages,
        draw(st.one_of(free, model)),
        ratio=draw(st.floats(1, 3)),
        send=draw(st.sampled_from([0.0, 0.1])),
        after=draw(st.sampled_from([0.0, 0.5])),
    )


@settings(max_examples=60, deadline=None)
@given(rows())
def test_the_fastest_of_all_cuts(r: PipelineBlocks) -> None:
    best = min(simulated(r, cut) for cut in every_cut(r.blocks, r.stages))
    assert simulated(r, fastest_boundaries(r)) == pytest.approx(best, rel=1e-8)


@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", 3), ("1f1b", 5), ("dualpipev", 6)])
@pytest.mark.parametrize("seed", range(4))
def test_the_descent_finds_what_trying_all_finds(
    schedule: Schedule, stages: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = np.random.default_rng(seed).uniform(0.1, 1, 10).tolist()
    r = row(schedule, 9, stages, seconds)
    best = min(simulated(r, cut) for cut in every_cut(r.blocks, r.stages))
    monkeypatch.setattr(stage_assignment, "MAX_EXHAUSTIVE", 0)
    fastest_boundaries.cache_clear()
    assert simulated(r, fastest_boundaries(r)) <= best * 1.01
    fastest_boundaries.cache_clear()


@settings(max_examples=40, deadline=None)
@given(rows(), st.integers(1, 7))
def test_the_fastest_of_the_allowed_cuts(r: PipelineBlocks, most: int) -> None:
    """At most so many blocks on the first stage, as little memory would have it."""

    def allows(cut: tuple[int, ...]) -> bool:
        return cut[1] <= most

    found = fastest_boundaries_where(r, allows, None)
    assert found is not None and allows(found)
    best = min(simulated(r, cut) for cut in every_cut(r.blocks, r.stages) if allows(cut))
    assert simulated(r, found) == pytest.approx(best, rel=1e-8)
    assert fastest_boundaries_where(r, lambda cut: False, None) is None


@settings(max_examples=150, deadline=None)
@given(rows())
def test_no_step_is_below_its_bound(r: PipelineBlocks) -> None:
    every = np.array(every_cut(r.blocks, r.stages))
    steps = stage_assignment.step_seconds(r, every)
    assert (stage_assignment._lower_bounds(r, every) <= steps * (1 + 1e-9)).all()


@pytest.mark.parametrize(
    ("layers", "stages", "head", "m"), [(32, 8, 2.4, 16), (32, 8, 2.4, 64), (126, 16, 0.6, 16)]
)
def test_heavy_stages_are_in_front(layers: int, stages: int, head: float, m: int) -> None:
    """Of equal layers the first stages get more, and the step is shorter than that of the least
    slowest stage."""
    r = row("1f1b", m, stages, [0.05, *[1.0] * layers, head])
    cut = fastest_boundaries(r)
    sizes = [b - a for a, b in itertools.pairwise(cut)]
    assert sizes[0] == max(sizes) > sizes[-2]
    assert simulated(r, cut) < simulated(r, r.balanced_start) * 0.9999


def test_updates_are_balanced_where_they_take_the_longest() -> None:
    """One micro-batch crosses all stages, whatever their work, so that the longest update alone
    decides. No move of one block shortens it while both ends hold a heavy block."""
    updates = [2.4, *[1.0] * 32, 2.4]
    pipeline_blocks = dataclasses.replace(
        row("1f1b", 1, 16, [1e-3] * 34),
        once_per_step_seconds=tuple(itertools.accumulate(updates, initial=0.0)),
    )
    cut = fastest_boundaries(pipeline_blocks)
    assert max(sum(updates[a:b]) for a, b in itertools.pairwise(cut)) == pytest.approx(3.0)

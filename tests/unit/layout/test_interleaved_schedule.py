"""Megatron's interleaved 1F1B: its table, its step where the parts are even, and what of it the
search relies on."""

from __future__ import annotations

import itertools
import random

import pytest

from shardwright.layout import interleaved_schedule
from shardwright.layout.interleaved_schedule import (
    micro_batches_in_flight,
    simulate,
    step_seconds,
    warmup_forward_passes,
)

SHAPES = [(2, 2, 4), (4, 2, 8), (4, 4, 16), (3, 3, 3), (8, 4, 32)]


@pytest.mark.parametrize(("ranks", "chunks", "micro_batches"), SHAPES)
def test_even_parts_idle_as_published(ranks: int, chunks: int, micro_batches: int) -> None:
    """arXiv 2104.04473, section 2.2: (p - 1) / v of a micro-batch's passes over a rank."""
    parts = ranks * chunks
    seconds = step_seconds(ranks, micro_batches, (1.0 / chunks,) * parts, (2.0 / chunks,) * parts)
    assert seconds == pytest.approx(3 * micro_batches + 3 * (ranks - 1) / chunks)


def uneven(seed: int, parts: int, share: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    draw = random.Random(seed)
    forward = [draw.uniform(1 - share, 1 + share) for _ in range(parts)]
    return tuple(forward), tuple(2 * f * draw.uniform(0.95, 1.05) for f in forward)


@pytest.mark.parametrize("seed", range(12))
def test_later_groups_go_on_as_the_last_simulated_one(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, chunks = ((4, 2), (8, 4), (6, 3))[seed % 3]
    forward, backward = uneven(seed, ranks * chunks, 0.05)
    monkeypatch.setattr(interleaved_schedule, "MAX_SIMULATED_PASSES", 0)
    shortened = step_seconds.__wrapped__(ranks, 12 * ranks, forward, backward)
    monkeypatch.setattr(interleaved_schedule, "MAX_SIMULATED_PASSES", 10**9)
    assert shortened == pytest.approx(
        step_seconds.__wrapped__(ranks, 12 * ranks, forward, backward), rel=0.01
    )


@pytest.mark.parametrize(("ranks", "chunks", "micro_batches"), SHAPES)
def test_every_pass_waits_for_what_it_needs(ranks: int, chunks: int, micro_batches: int) -> None:
    """A rank does one thing at a time; forward passes follow the model's parts, backward passes the
    other way."""
    forward, backward = uneven(1, ranks * chunks, 0.3)
    timeline = simulate(ranks, micro_batches, forward, backward, 0.01)
    ends = {(i.name, i.stage, i.micro_batch): i for rank in timeline.ranks for i in rank}
    assert len(ends) == 2 * ranks * chunks * micro_batches
    for rank, passes in enumerate(timeline.ranks):
        assert all(a.stop_seconds <= b.start_seconds + 1e-9 for a, b in itertools.pairwise(passes))
        assert {i.stage % ranks for i in passes} == {rank}
    for (name, part, micro_batch), each in ends.items():
        ahead = name == "ForwardPass"
        needs = (name, part - 1 if ahead else part + 1, micro_batch)
        if not ahead and part == ranks * chunks - 1:
            needs = ("ForwardPass", part, micro_batch)
        if needs in ends:
            assert each.start_seconds >= ends[needs].stop_seconds - 1e-9
    assert timeline.seconds == max(e.stop_seconds for rank in timeline.exchanges for e in rank)


@pytest.mark.parametrize(("ranks", "chunks", "micro_batches"), SHAPES)
def test_what_a_rank_keeps_at_its_first_backward_pass(
    ranks: int, chunks: int, micro_batches: int
) -> None:
    timeline = simulate(ranks, micro_batches, *uneven(2, ranks * chunks, 0.1), 0.0)
    for rank, passes in enumerate(timeline.ranks):
        first = next(place for place, each in enumerate(passes) if each.name == "BackwardPass")
        kept = [sum(i.stage // ranks == chunk for i in passes[:first]) for chunk in range(chunks)]
        assert tuple(kept) == micro_batches_in_flight(ranks, rank, chunks, micro_batches)


@pytest.mark.parametrize(("ranks", "chunks", "micro_batches"), SHAPES)
def test_the_tables_are_megatrons(ranks: int, chunks: int, micro_batches: int) -> None:
    from megatron.core.pipeline_parallel import schedules

    class Ring:
        virtual_pipeline_model_parallel_size = chunks

        def __init__(self, rank: int) -> None:
            self.pp_group = self
            self.at = rank

        def size(self) -> int:
            return ranks

        def rank(self) -> int:
            return self.at

    table = schedules.get_schedule_table(micro_batches, chunks, ranks)
    timeline = simulate(ranks, micro_batches, *uneven(3, ranks * chunks, 0.1), 0.0)
    for rank, passes in enumerate(timeline.ranks):
        ahead = [(i.micro_batch, i.stage // ranks) for i in passes if i.name == "ForwardPass"]
        back = [
            (i.micro_batch, chunks - 1 - i.stage // ranks)
            for i in passes
            if i.name == "BackwardPass"
        ]
        assert ahead == back == table
        _, _, warm, _ = schedules.get_pp_rank_microbatches(
            micro_batches, chunks, ranks, p2p_communicator=Ring(rank)
        )
        assert warm == warmup_forward_passes(ranks, rank, chunks, micro_batches)

"""A late rank, a slow link and a slow layer are told from one another by the ranks' traces."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from shardwright.trace.kernel_classes import Line
from shardwright.trace.rank_comparison import Cause, expected_seconds, find_causes
from shardwright.trace.step_trace import RankTrace, read_step_trace
from tests.unit.trace.test_plan_comparison import priced
from tests.unit.trace.trace_files import LAYERS, Event, event, kernel, nccl, step_marks, write_trace

RANKS = 4
ELEMENTS = 40_000_000


def causes(
    tmp_path: Path,
    *,
    late: int | None = None,
    transfer: float = 1.0,
    slow_group: tuple[int, ...] = (),
    marked: int | None = None,
    between: int | None = None,
) -> tuple[Cause, ...]:
    """Profile four ranks whose step is 10 ms of computing and all-reduces. The late rank computes
    6 ms longer; collectives end on all ranks at once, and clocks differ.

    transfer: over what the plan's link takes. slow_group: the pair whose link is 20 times slower.
    """
    plan, _ = priced(gpus=RANKS)
    chosen = random.Random(5)
    traces: list[RankTrace] = []
    for rank in range(RANKS):
        clock = chosen.uniform(-1e5, 1e5)
        arrive = 16.0 if rank == late else 10.0 + chosen.uniform(0, 0.1)
        last = 16.0 if late is not None else 10.1
        events: list[Event] = [kernel("matrix_products", clock, arrive)]
        pair = (rank // 2 * 2, rank // 2 * 2 + 1)
        at = last
        for line, ranks in (("all_reduce", range(RANKS)), ("all_gather", pair)):
            name: Line = "all_reduce" if line == "all_reduce" else "all_gather"
            call = nccl(name, 0, 0, ELEMENTS, ranks)
            call["args"]["Process Group Name"] = line
            sample = read_step_trace(
                write_trace(tmp_path / "one", [call, kernel("attention", 1, 1)])
            )
            seconds = expected_seconds(plan, sample.collectives[0])
            assert seconds is not None
            took = 1e3 * seconds * transfer * (20 if tuple(ranks) == slow_group else 1)
            start = arrive if line == "all_reduce" else at
            call["ts"], call["dur"] = 5e6 + (clock + start) * 1e3, (at + took - start) * 1e3
            events.append(call)
            at += took
        events += _layer_marks(clock, marked) + _attention(clock, between)
        events += step_marks((clock, clock + at + 1))
        traces.append(
            read_step_trace(write_trace(tmp_path / f"{rank}.json", events, rank=rank, world=RANKS))
        )
    return find_causes(plan, traces)


def _layer_marks(clock: float, slow: int | None) -> list[Event]:
    if slow is None:
        return []
    marks, at = [], clock
    for layer in range(LAYERS):
        took = 2.5 if layer == slow else 0.2
        marks.append(event("gpu_user_annotation", f"layers.{layer}", at, took, tid=7))
        at += took
    return marks


def _attention(clock: float, slow: int | None) -> list[Event]:
    if slow is None:
        return []
    calls, at = [], clock
    for layer in range(LAYERS):
        calls.append(kernel("attention", at, 0.05))
        at += 2.5 if layer == slow else 0.2
    return calls


def test_nothing_is_found_where_nothing_is_wrong(tmp_path: Path) -> None:
    assert causes(tmp_path) == ()


@pytest.mark.parametrize("late", range(RANKS))
def test_a_late_rank(late: int, tmp_path: Path) -> None:
    first, *rest = causes(tmp_path, late=late)
    assert (first.kind, first.subject, rest) == ("late_rank", f"rank {late}", [])
    assert first.seconds == pytest.approx(6e-3, rel=0.05)
    assert "its own matrix products takes" in first.message


def test_a_slow_link_of_all(tmp_path: Path) -> None:
    found = causes(tmp_path, transfer=4.0)
    assert {cause.kind for cause in found} == {"slow_link"}
    assert found[0].subject == "ranks 0, 1, 2, 3" and "GB/s" in found[0].message


@pytest.mark.parametrize("pair", [(0, 1), (2, 3)])
def test_the_slow_link_of_one_pair(pair: tuple[int, int], tmp_path: Path) -> None:
    first, *rest = causes(tmp_path, slow_group=pair)
    assert (first.kind, first.subject) == ("slow_link", f"ranks {pair[0]}, {pair[1]}")
    assert not rest


def test_the_dearest_first(tmp_path: Path) -> None:
    found = causes(tmp_path, late=2, transfer=3.0)
    assert found[0].kind == "late_rank"
    assert {cause.kind for cause in found} == {"late_rank", "slow_link"}


def test_ends_that_differ_make_no_rank_late(tmp_path: Path) -> None:
    plan, _ = priced(gpus=2)
    traces = []
    for rank, took in ((0, 60.0), (1, 90.0)):  # both begin at once; gloo ends at different times
        events = [kernel("matrix_products", 0, 10), nccl("all_reduce", 10, took, 10**8, range(2))]
        path = tmp_path / f"{rank}.json"
        write_trace(path, [*events, *step_marks((0, 110))], rank=rank)
        path.write_text(path.read_text().replace("{", '{"host_name": "a", ', 1))
        traces.append(read_step_trace(path))
    assert {cause.kind for cause in find_causes(plan, traces)} <= {"slow_link"}


def test_queued_collectives_count_a_wait_once(tmp_path: Path) -> None:
    plan, _ = priced(gpus=2)
    traces = []
    for rank, start in ((0, 10.0), (1, 40.0)):
        events = [kernel("matrix_products", 0, start)]
        events += [
            nccl("all_reduce", start + at, 60 - start - at, 10**6, range(2)) for at in (0, 1, 2)
        ]
        path = write_trace(tmp_path / f"{rank}.json", [*events, *step_marks((0, 100))], rank=rank)
        traces.append(read_step_trace(path))
    late = next(c for c in find_causes(plan, traces) if c.kind == "late_rank")
    assert late.subject == "rank 1" and "wait 32.0 ms" in late.message


def test_a_slow_layer_by_marks(tmp_path: Path) -> None:
    found = causes(tmp_path, marked=7)
    assert {cause.subject for cause in found} == {"layers. 7"}
    assert found[0].kind == "slow_layer"
    assert found[0].seconds == pytest.approx(2.3e-3, rel=0.01)


def test_a_slow_layer_by_attention(tmp_path: Path) -> None:
    found = causes(tmp_path, between=12)
    assert {cause.kind for cause in found} == {"slow_layer"}
    assert all("layer 12 to 13" in cause.subject for cause in found)


def test_backward_attention_counts_from_the_last_layer(tmp_path: Path) -> None:
    plan, _ = priced(gpus=1)
    events: list[dict[str, Any]] = []
    at = 0.0
    for way, slow in (("fwd", -1), ("bwd", 5)):
        for layer in range(LAYERS) if way == "fwd" else reversed(range(LAYERS)):
            name = f"void flash_{way}_kernel<128>(Params)"
            events.append(kernel("attention", at, 0.05) | {"name": name})
            at += 3.0 if layer == slow else 0.2
    trace = read_step_trace(write_trace(tmp_path / "t.json", [*events, *step_marks((0, at))]))
    (found,) = find_causes(plan, [trace])
    assert found.subject.startswith("layer 4 to 5")


def test_recomputed_attention_is_no_layer_more(tmp_path: Path) -> None:
    plan, _ = priced(gpus=1, activation_checkpointing="full")
    events = [kernel("attention", 0.2 * layer, 0.05) for layer in range(LAYERS)]
    at = 0.2 * LAYERS
    for _ in range(LAYERS):  # each layer again, then its backward pass
        events.append(kernel("attention", at, 0.05))
        events.append(kernel("attention", at + 0.1, 0.1) | {"name": "flash_bwd_kernel"})
        at += 0.4
    trace = read_step_trace(write_trace(tmp_path / "t.json", [*events, *step_marks((0, at))]))
    assert find_causes(plan, [trace]) == ()

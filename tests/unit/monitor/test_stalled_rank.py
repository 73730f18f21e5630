"""Which rank the others wait for."""

from __future__ import annotations

import threading

import pytest

from shardwright.monitor.rank_events import (
    RankStack,
    stall_text,
    suspect_ranks,
    thread_location,
)


def stack(current_collective: str | None, **counts: int) -> RankStack:
    return RankStack(
        step=4,
        phase="in step 5",
        where="train.py:7 in step",
        current_collective=current_collective,
        counts=counts,
    )


@pytest.mark.parametrize(
    ("stacks", "ranks", "blamed"),
    [
        pytest.param(
            {0: stack("recv"), 1: stack(None), 2: stack("recv")},
            3,
            (1,),
            id="outside every collective",
        ),
        pytest.param({0: stack("recv"), 2: stack(None)}, 3, (1,), id="does not answer"),
        pytest.param(
            {0: stack(None, w=9), 1: stack(None, w=8), 2: stack(None, w=9)},
            3,
            (1,),
            id="GPUs: behind",
        ),
        pytest.param(
            # 0 waits for 1 in a, 1 for 2 in b: only 2 is waited for and waits for nobody.
            {0: stack("recv", a=3), 1: stack("recv", a=2, b=7), 2: stack("recv", b=6)},
            3,
            (2,),
            id="at the end of a chain",
        ),
        pytest.param(
            {0: stack("recv", w=9), 1: stack("recv", w=9)}, 2, (), id="all wait for each other"
        ),
    ],
)
def test_the_rank_that_waits_for_nobody(
    stacks: dict[int, RankStack], ranks: int, blamed: tuple[int, ...]
) -> None:
    assert suspect_ranks(stacks, range(ranks)) == blamed
    text = stall_text(stacks, blamed, dict.fromkeys(range(ranks), "b"), 600)
    assert text.startswith("no step for 600 s: ")
    assert all(f"rank {rank} on b" in text for rank in blamed)


def test_where_a_thread_is() -> None:
    began, end = threading.Event(), threading.Event()

    def sits() -> None:
        began.set()
        end.wait()

    thread = threading.Thread(target=sits)
    thread.start()
    began.wait()
    assert thread.ident is not None
    where, collective = thread_location(thread.ident)
    end.set()
    assert "in wait" in where and collective is None

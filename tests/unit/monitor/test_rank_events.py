"""What ranks say, and which of it is the cause."""

from __future__ import annotations

import os
from pathlib import Path

from shardwright.monitor.rank_events import (
    EVENT_PREFIX,
    MAX_EVENT_BYTES,
    RankFailed,
    RankLost,
    RunNotice,
    RunStalled,
    emit,
    first_failure,
    parse_event,
    read_events,
)


def failed(rank: int, cause: str) -> RankFailed:
    return RankFailed(rank=rank, cause=cause)


def lost(rank: int) -> RankLost:
    return RankLost(rank=rank)


def test_a_rank_s_own_error_goes_before_a_lost_rank_and_that_before_an_echo() -> None:
    echo, own = (
        failed(0, "RuntimeError: Connection closed by peer"),
        failed(2, "OSError: the disk went away"),
    )
    assert first_failure([echo, lost(1), own, lost(3)]) == own
    assert first_failure([echo, lost(1), lost(3)]) == lost(1)
    assert first_failure([echo]) == echo
    assert first_failure([RunNotice(text="x")]) is None


def test_a_line_arrives_whole_however_long_the_traceback() -> None:
    reader, writer = os.pipe()
    emit(
        writer,
        RankFailed(
            rank=1,
            cause="ValueError: x" * 400,
            traceback='File "é", line 1\n' * 4000 + "the last line",
        ),
    )
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        line = file.read()
    assert len(line) <= MAX_EVENT_BYTES and line.count(b"\n") == 1
    event = parse_event(f"b: {line.decode()}")
    assert isinstance(event, RankFailed) and event.rank == 1
    assert event.cause.startswith("ValueError") and event.traceback.endswith("the last line")


def test_the_other_lines_and_halves_of_events_are_passed_over() -> None:
    lines = [
        "step 1",
        f"a: {EVENT_PREFIX}" + '{"kind": "lost", "rank": 3}',
        f"{EVENT_PREFIX}" + '{"kind": "lo',
        f"{EVENT_PREFIX}[1]",
    ]
    assert read_events(lines) == [RankLost(rank=3)]


def test_every_event_comes_back_as_it_was_sent(tmp_path: Path) -> None:
    sent: list[RankFailed | RankLost | RunStalled | RunNotice] = [
        RankFailed(rank=1, host="b", stage=0, code="SW6301", cause="c", help="h", traceback="t"),
        RankLost(rank=2, host="b", stage=1, pid=7),
        RankLost(rank=0, host="a"),
        RunStalled(ranks=(1, 2), text="two ranks"),
        RunNotice(text="x"),
    ]
    with (tmp_path / "output").open("wb") as file:
        for event in sent:
            emit(file.fileno(), event)
    lines = (tmp_path / "output").read_text().splitlines()
    assert read_events(lines) == sent
    assert lines[0] == EVENT_PREFIX + (
        '{"kind": "failed", "rank": 1, "host": "b", "stage": 0, "code": "SW6301", "cause": "c", '
        '"help": "h", '
        '"traceback": "t"}'
    )
    assert lines[2] == EVENT_PREFIX + '{"kind": "lost", "rank": 0, "host": "a", "stage": null}'


def test_an_unknown_kind_is_no_news_but_for_its_text() -> None:
    lines = [
        f"{EVENT_PREFIX}" + '{"kind": "later", "text": "x"}',
        f"{EVENT_PREFIX}" + '{"kind": "later"}',
        f"{EVENT_PREFIX}" + '{"kind": "lost"}',
    ]
    assert read_events(lines) == [RunNotice(text="x"), RunNotice(text="")]

"""What ranks say, and which of it is the cause."""

from __future__ import annotations

import os

from shardwright.watch.events import EVENT, MOST_BYTES, Event, emit, first_cause, parse_event, read_events


def failed(rank: int, cause: str) -> Event:
    return {"kind": "failed", "rank": rank, "cause": cause}


def lost(rank: int) -> Event:
    return {"kind": "lost", "rank": rank}


def test_a_rank_s_own_error_goes_before_a_lost_rank_and_that_before_an_echo() -> None:
    echo, own = failed(0, "RuntimeError: Connection closed by peer"), failed(2, "OSError: the disk went away")
    assert first_cause([echo, lost(1), own, lost(3)]) == own
    assert first_cause([echo, lost(1), lost(3)]) == lost(1)
    assert first_cause([echo]) == echo
    assert first_cause([{"kind": "note", "text": "x"}]) is None


def test_a_line_arrives_whole_however_long_the_traceback() -> None:
    reader, writer = os.pipe()
    emit(writer, {**failed(1, "ValueError: x" * 400), "traceback": 'File "é", line 1\n' * 4000 + "the last line"})
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        line = file.read()
    assert len(line) <= MOST_BYTES and line.count(b"\n") == 1
    event = parse_event(f"b: {line.decode()}")
    assert event is not None and event["rank"] == 1
    assert str(event["cause"]).startswith("ValueError") and str(event["traceback"]).endswith("the last line")


def test_the_other_lines_and_halves_of_events_are_passed_over() -> None:
    lines = ["step 1", f"a: {EVENT}" + '{"kind": "lost", "rank": 3}', f"{EVENT}" + '{"kind": "lo', f"{EVENT}[1]"]
    assert read_events(lines) == [{"kind": "lost", "rank": 3}]

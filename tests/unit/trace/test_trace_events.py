"""Reading a trace event by event: every form that profilers write, and files that are none."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from shardwright.diagnostics import Refusal
from shardwright.trace import trace_events
from shardwright.trace.step_trace import read_step_trace
from shardwright.trace.trace_events import TraceReader, open_profile_file
from tests.unit.trace.trace_files import document, kernel, write_trace

EVENTS = [kernel("matrix_products", at, 0.5, note='quoted "}", é and \\') for at in range(50)]


def read(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    with open_profile_file(path) as file:
        reader = TraceReader(file, path)
        return list(reader.events()), reader.entries


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("chunk", [1, 7, 1000, 2**20])
def test_events_and_entries_at_any_chunk(
    indent: int | None, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_events, "CHUNK_BYTES", chunk)
    path = tmp_path / "t.json"
    whole = document(EVENTS, rank=3) | {"last": 12345}
    path.write_text(json.dumps(whole, indent=indent, ensure_ascii=False), encoding="utf-8")
    events, entries = read(path)
    assert events == EVENTS
    assert entries == {key: value for key, value in whole.items() if key != "traceEvents"}


def test_gzip_and_a_list_alone(tmp_path: Path) -> None:
    (tmp_path / "t.json.gz").write_bytes(gzip.compress(json.dumps(document(EVENTS)).encode()))
    assert read(tmp_path / "t.json.gz")[0] == EVENTS
    (tmp_path / "list.json").write_text(json.dumps(EVENTS))
    assert read(tmp_path / "list.json") == (EVENTS, {})


def test_no_more_than_a_chunk_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_events, "CHUNK_BYTES", 1000)
    path = write_trace(tmp_path / "t.json", EVENTS * 20)
    with open_profile_file(path) as file:
        reader = TraceReader(file, path)
        kept = max(len(reader._text) for _ in reader.events())
    assert path.stat().st_size > 100_000 and kept < 4000


def damaged(tmp_path: Path) -> dict[str, tuple[bytes, str]]:
    """Return files by name, each with the code that it is refused with."""
    good = json.dumps(document(EVENTS)).encode()
    packed = gzip.compress(good)
    return {
        "empty": (b"", "SW3312"),
        "blank": (b" \n\t ", "SW3312"),
        "text": (b"step 1 loss 3.2\n", "SW3312"),
        "number": (b"12", "SW3312"),
        "foreign": (b'{"name": "package", "version": "1.0.0"}', "SW3312"),
        "foreign-list": (b"[1, 2, 3]", "SW3316"),
        "no-events": (b'{"traceEvents": []}', "SW3316"),
        "events-are-no-list": (b'{"traceEvents": {"a": 1}}', "SW3312"),
        "broken": (good.replace(b'"ts": ', b'"ts": : ', 1), "SW3312"),
        "no-colon": (b'{"traceEvents" [1]}', "SW3312"),
        "deep": (b'{"a": ' + b"[" * 200_000, "SW3312"),
        "cut-in-an-event": (good[: len(good) // 2], "SW3313"),
        "cut-in-a-string": (good[: good.rindex(b"NNT")], "SW3313"),
        "cut-between-events": (good[: good.rindex(b', {"ph"')], "SW3313"),
        "cut-behind-the-list": (good[: good.rindex(b', "traceName"')], "SW3313"),
        "cut-gzip": (packed[: len(packed) // 2], "SW3313"),
        "damaged-gzip": (packed[:40] + b"\0\0\0\0" + packed[44:], "SW3311"),
        "binary": (bytes(range(256)) * 20, "SW3312"),
    }


@pytest.mark.parametrize("name", sorted(damaged(Path())))
def test_what_is_no_whole_trace_is_refused(name: str, tmp_path: Path) -> None:
    content, code = damaged(tmp_path)[name]
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(Refusal) as refused:
        read_step_trace(path)
    (found,) = refused.value.diagnostics
    assert found.code == code and str(path) in found.message and found.help
    assert "\n" not in found.message


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(Refusal) as refused:
            read_step_trace(path)
        assert refused.value.diagnostics[0].code == "SW3311"


def test_a_value_without_end_is_refused_in_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_events, "MAX_VALUE_CHARACTERS", 10_000)
    path = tmp_path / "t.json"
    path.write_text('{"traceEvents": [{"name": "' + "x" * 3_000_000)
    with pytest.raises(Refusal, match="no end") as refused:
        read_step_trace(path)
    assert refused.value.diagnostics[0].code == "SW3312"


def test_strange_values_in_events_are_left_out(tmp_path: Path) -> None:
    good = [kernel("matrix_products", 0, 2), kernel("attention", 2, 1)]
    strange: list[dict[str, Any]] = [
        {**kernel("attention", 3, 1), "dur": -5},
        {**kernel("attention", 3, 1), "ts": None},
        {**kernel("attention", 3, 1), "ts": "soon"},
        {**kernel("attention", 3, 1), "dur": True},
        {**kernel("attention", 3, 1), "dur": 1e300},
        {**kernel("attention", 3, 1), "dur": float("nan")},
        {"ph": "X"},
        {"ph": "X", "name": 3, "cat": "kernel"},
        {"ph": "X", "name": "x", "cat": ["kernel"], "ts": 0, "dur": 1},
        {"ph": "i", "name": "[memory]", "args": [1]},
        {**kernel("attention", 2.5, 0.1), "args": "none"},
    ]
    found = read_step_trace(write_trace(tmp_path / "t.json", [*good, *strange]))
    assert found.unread_events == 6
    assert found.step_seconds == pytest.approx(3e-3)
    assert found.lines["matrix_products"].seconds == pytest.approx(2e-3)

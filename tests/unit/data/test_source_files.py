"""Files as they come: compressed, as one JSON array, with a byte order mark, with records of no
use."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwright.data.data_summary import summarize
from shardwright.data.source_files import (
    RecordCounts,
    json_records,
    read_record_counts,
    records,
    text_chunks,
    texts,
)
from shardwright.diagnostics import Refusal
from tests.unit.data.data_plans import opened, part, plan, refused

TEXTS = ["hello", "wörld", "again and\nagain", "\U0001f600 [1, 2]"]
LINES = "\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in TEXTS).encode("utf-8")


def zstd(data: bytes) -> bytes:
    return bytes(pytest.importorskip("zstandard").ZstdCompressor().compress(data))


PACKED: list[Callable[[bytes], bytes]] = [gzip.compress, bz2.compress, lzma.compress, zstd]


def read(path: Path, report: RecordCounts | None = None) -> list[str]:
    return [text for text, _ in texts(str(path), "jsonl", "text", report or RecordCounts())]


@pytest.mark.parametrize("pack", PACKED)
def test_compressed_files_are_read_by_what_they_hold(
    tmp_path: Path, pack: Callable[[bytes], bytes]
) -> None:
    data = pack(LINES[:40]) + pack(LINES[40:])  # as `cat a.gz b.gz` joins them
    (tmp_path / "a.jsonl.any").write_bytes(data)
    assert read(tmp_path / "a.jsonl.any") == TEXTS
    taken = sum(size for _, _, size in json_records(str(tmp_path / "a.jsonl.any"), RecordCounts()))
    assert taken == len(data), "progress counts bytes of the file"
    (tmp_path / "b").write_bytes(pack("zwölf\n".encode() * 3))
    assert "".join(text for text, _ in text_chunks(str(tmp_path / "b"))) == "zwölf\n" * 3


@pytest.mark.parametrize("pack", PACKED)
def test_a_compressed_file_that_is_cut_off(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    lines = b"".join(b'{"text": "%d"}\n' % (n * n) for n in range(20_000))
    (tmp_path / "a.gz").write_bytes(pack(lines)[:-20])
    for share in (0.0, 0.5):
        code, message = refused(
            plan(part("jsonl", tmp_path / "*.gz", skip_damaged=share)), tmp_path
        )
        assert code == "SW6151" and str(tmp_path / "a.gz") in message


def test_zstd_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.zst").write_bytes(b"\x28\xb5\x2f\xfd" + bytes(20))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    code, message = refused(plan(part("jsonl", tmp_path / "a.zst")), tmp_path)
    assert code == "SW6118" and "zstandard" in message


@pytest.mark.parametrize("size", [1, 7, 4096])
@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_array_of_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, indent: int | None
) -> None:
    monkeypatch.setattr("shardwright.data.source_files.PIECE_BYTES", size)
    document = json.dumps([{"text": text} for text in TEXTS], indent=indent, ensure_ascii=False)
    (tmp_path / "a.json").write_text(f"\n {document}\n\n", encoding="utf-8")
    assert read(tmp_path / "a.json") == TEXTS
    places = [where for _, where, _ in json_records(str(tmp_path / "a.json"), RecordCounts())]
    wanted = [3, 6, 9, 12] if indent else [2, 2, 2, 2]
    assert places == [f"{tmp_path / 'a.json'}:{line}" for line in wanted]
    (tmp_path / "empty.json").write_text("[ ]")
    assert read(tmp_path / "empty.json") == []


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (
            '[{"text": "a"},\n {"text": "b"}',
            ":2: this array is not JSON: the file ends inside it",
        ),
        ('[{"text": "a"},\n\n {"text": ]', ":3: this entry of the array is not JSON"),
        ('[{"text": "a"}\n {"text": "b"}]', ":2: this array is not JSON: '{' is in place of ,"),
        ('[{"text": "a"},]', ":1: this entry of the array is not JSON: Expecting value"),
        ('[{"text": "a"}]\n[]', ":2: the text after the array is not JSON"),
        ('{"text":\n "a"}', ":1: this line is not JSON"),
    ],
)
def test_arrays_that_are_none(tmp_path: Path, content: str, told: str) -> None:
    (tmp_path / "a.json").write_text(content)
    code, message = refused(plan(part("jsonl", tmp_path / "a.json")), tmp_path)
    assert code == "SW6109" and told in message, message


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    mark = b"\xef\xbb\xbf"
    (tmp_path / "lines").write_bytes(mark + LINES + b"\n" + mark + b'{"text": "joined"}')
    (tmp_path / "array").write_bytes(mark + b'[{"text": "a"}]')
    (tmp_path / "text").write_bytes(mark + b"text")
    (tmp_path / "packed").write_bytes(gzip.compress(mark + b"text"))
    assert read(tmp_path / "lines") == [*TEXTS, "joined"] and read(tmp_path / "array") == ["a"]
    for name in ("text", "packed"):
        assert [text for text, _ in text_chunks(str(tmp_path / name))] == ["text"]


def tar_of(data: bytes) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a.jsonl"), io.BytesIO(data))
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"PK\x03\x04" + bytes(30), "a zip archive"),
        (b"PAR1" + bytes(30), "a parquet file"),
        (b"ARROW1" + bytes(30), "an Arrow file"),
        (b"\x93NUMPY\x01\x00", "a NumPy array"),
        ("text".encode("utf-16"), "text in UTF-16"),
        (tar_of(b""), "a tar archive"),
        (gzip.compress(tar_of(b"")), "a tar archive, compressed"),
    ],
    ids=[
        "zip",
        "parquet",
        "arrow",
        "numpy",
        "utf-16",
        "tar",
        "tar-gz",
    ],  # compressed bytes hold the time
)
@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_other_formats_are_named(tmp_path: Path, kind: str, content: bytes, told: str) -> None:
    (tmp_path / "a").write_bytes(content)
    code, message = refused(plan(part(kind, tmp_path / "a")), tmp_path)
    assert code == "SW6150" and told in message


def test_half_of_a_surrogate_pair_is_replaced_and_counted(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"text": "cut \\ud83d", "\\udc00": ["\\ud800", {"a": 1}]}\n{"text": "\\ud83d\\ude00"}\n'
    )
    report = RecordCounts()
    found = [record for record, _, _ in records(str(tmp_path / "a.jsonl"), report)]
    assert found == [{"text": "cut \ufffd", "\ufffd": ["\ufffd", {"a": 1}]}, {"text": "\U0001f600"}]
    assert report.replaced == 1
    p = plan(part("jsonl", tmp_path / "a.jsonl"), batch=1)
    opened(p, tmp_path)
    assert summarize(p, tmp_path)[0].replaced == 1


BAD = ['{"text": null}', '{"body": "a"}', '{"text": 5}', '{"text": ', '["a"]', '{"text": "\xe9"}']


def test_records_without_text_are_left_out_by_share(tmp_path: Path) -> None:
    good = ['{"text": "some text"}'] * 18
    lines = [*good[:2], *BAD, *good[2:]]
    (tmp_path / "a.jsonl").write_bytes("\n".join(lines).encode("latin-1"))
    assert refused(plan(part("jsonl", tmp_path / "a.jsonl")), tmp_path)[0] == "SW6110"
    code, message = refused(plan(part("jsonl", tmp_path / "a.jsonl", skip_damaged=0.24)), tmp_path)
    assert (
        code == "SW6153"
        and "6 of 24 records" in message
        and "a.jsonl:3: 'text' holds null" in message
    )
    p = plan(part("jsonl", tmp_path / "a.jsonl", skip_damaged=0.25))
    data = opened(p, tmp_path)
    assert (
        bytes(data.train.read(np.arange(4)).tokens.astype(np.uint8).reshape(-1))
        == b"some textsome te"
    )
    (found,) = summarize(p, tmp_path)
    assert found.documents == 18 and found.records == 24
    assert found.unusable == {"SW6107": 1, "SW6109": 2, "SW6110": 3}
    assert {code: len(messages) for code, messages in found.examples.items()} == found.unusable
    assert len(list((tmp_path / "run" / "data").glob("*/records.json"))) == 1


def test_nulls_of_a_parquet_column(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": ["some", None, "text", "here"]}), tmp_path / "a.parquet")
    code, message = refused(plan(part("parquet", tmp_path / "a.parquet")), tmp_path)
    assert code == "SW6110" and "row 2: 'text' holds null" in message
    p = plan(part("parquet", tmp_path / "a.parquet", skip_damaged=0.25))
    opened(p, tmp_path)
    assert summarize(p, tmp_path)[0].unusable == {"SW6110": 1}


def test_a_map_in_parquet_is_an_object(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    arguments = pa.map_(pa.string(), pa.string())
    call = pa.struct([("function", pa.struct([("name", pa.string()), ("arguments", arguments)]))])
    message = pa.struct(
        [("role", pa.string()), ("content", pa.string()), ("tool_calls", pa.list_(call))]
    )

    def write(*items: tuple[str, str]) -> None:
        talk = [
            {"role": "user", "content": "Rain?"},
            {
                "role": "assistant",
                "tool_calls": [{"function": {"name": "weather", "arguments": list(items)}}],
            },
        ]
        column = pa.array([talk], type=pa.list_(message))
        pq.write_table(pa.table({"messages": column}), tmp_path / "a.parquet")

    write(("city", "Paris"), ("days", "3"))
    ((record, _, _),) = records(str(tmp_path / "a.parquet"), RecordCounts())
    messages: Any = record["messages"]
    arguments = messages[1]["tool_calls"][0]["function"]["arguments"]
    assert arguments == {"city": "Paris", "days": "3"}
    write(("city", "Paris"), ("city", "Rome"))
    with pytest.raises(Refusal, match=r"SW6117.*duplicate"):
        list(records(str(tmp_path / "a.parquet"), RecordCounts()))


def test_conversations_of_no_use_are_left_out_by_share(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the process that renders templates imports it")
    talk = {
        "messages": [{"role": "user", "content": "Two?"}, {"role": "assistant", "content": "Four."}]
    }
    bad = [
        {"messages": []},
        {"messages": None},
        {"talk": 1},
        {"messages": [{"role": "nobody", "content": "x"}]},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, [talk, *bad, *[talk] * 5])))
    template = (
        "{% for m in messages %}{% if m.role == 'nobody' %}{{ raise_exception('who?') }}{% endif %}"
        "<{{ m.role }}>{{ m.content }}</>{% endfor %}{% if add_generation_prompt %}<assistant>{% "
        "endif %}"
    )
    p = plan(part("chat", tmp_path / "a.jsonl", template=template, skip_damaged=0.4), length=60)
    opened(p, tmp_path)
    (found,) = summarize(p, tmp_path)
    assert found.documents == 6 and found.unusable == {"SW6110": 1, "SW6111": 2, "SW6112": 1}
    assert found.unclosed_conversations == 0
    (folder,) = (path.parent for path in (tmp_path / "run" / "data").glob("*/records.json"))
    assert read_record_counts(folder).records == 10


def test_a_turn_without_an_end_is_counted(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the process that renders templates imports it")
    talk = {
        "messages": [{"role": "user", "content": "Two?"}, {"role": "assistant", "content": "Four."}]
    }
    (tmp_path / "a.jsonl").write_text("\n".join([json.dumps(talk)] * 3))
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    p = plan(part("chat", tmp_path / "a.jsonl", template=template), length=60)
    opened(p, tmp_path)
    assert summarize(p, tmp_path)[0].unclosed_conversations == 3


def test_a_line_in_an_array_that_is_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwright.data.source_files.LONGEST_LINE_BYTES", 1000)
    monkeypatch.setattr("shardwright.data.source_files.PIECE_BYTES", 100)
    (tmp_path / "a.json").write_text('[{"text": "' + "x" * 5000)
    with pytest.raises(Refusal, match="SW6108"):
        read(tmp_path / "a.json")

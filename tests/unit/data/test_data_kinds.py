"""Every kind of data becomes rows; what cannot is refused by name and line, and leaves nothing
behind."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from shardwright.data.data_sources import matching_files
from shardwright.data.sequences import SequenceBatch
from tests.unit.data.data_plans import opened, part, plan, refused


def every_row(data: object) -> SequenceBatch:
    rows = data.train  # type: ignore[attr-defined]
    return rows.read(np.arange(len(rows)))  # type: ignore[no-any-return]


def test_bytes_are_one_stream_with_document_starts(tmp_path: Path) -> None:
    for name, text in {"b.txt": "world!", "a.txt": "hello", "empty.txt": ""}.items():
        (tmp_path / name).write_text(text)
    block = every_row(opened(plan(part("text", tmp_path / "*.txt")), tmp_path))
    assert bytes(block.tokens.astype(np.uint8).reshape(-1)) == b"hellowor", (
        "in name order, cut into rows of 4"
    )
    assert block.starts is not None
    assert block.starts.astype(int).tolist() == [[1, 0, 0, 0], [0, 1, 0, 0]]


def test_jsonl_and_parquet_give_the_same_rows(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = ["hello", "", "wörld", "again and again"]
    lines = [json.dumps({"body": t, "n": i}) for i, t in enumerate(texts)]
    (tmp_path / "a.jsonl").write_text("\n\n".join(lines), encoding="utf-8")
    pq.write_table(
        pa.table({"n": [0, 1, 2, 3], "body": texts}), tmp_path / "a.parquet", row_group_size=2
    )
    blocks = [
        every_row(opened(plan(part(kind, tmp_path / f"a.{kind}", field="body")), tmp_path / kind))
        for kind in ("jsonl", "parquet")
    ]
    assert np.array_equal(blocks[0].tokens, blocks[1].tokens)
    assert np.array_equal(blocks[0].starts, blocks[1].starts)  # type: ignore[arg-type]
    joined = "".join(texts).encode()
    assert bytes(blocks[0].tokens.astype(np.uint8).reshape(-1)) == joined[: len(joined) // 4 * 4]


def test_a_hugging_face_tokenizer_ends_documents(tmp_path: Path) -> None:
    word_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "a.txt").write_text("the cat sat")
    (tmp_path / "b.txt").write_text("the dog")
    p = plan(
        part("text", tmp_path / "?.txt", tokenizer="tokenizer"), length=2, vocabulary=5, batch=1
    )
    block = every_row(opened(p, tmp_path))
    assert block.tokens.reshape(-1).tolist() == [2, 3, 4, 0, 2, 1]
    assert block.starts is not None and block.starts.reshape(-1).astype(int).tolist() == [
        1,
        0,
        0,
        0,
        1,
        0,
    ]


def word_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<eos>": 0, "<unk>": 1, "the": 2, "cat": 3, "sat": 4}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>")
    fast.save_pretrained(folder)


def test_a_tokenizer_larger_than_the_vocabulary(tmp_path: Path) -> None:
    word_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "a.txt").write_text("the cat sat")
    p = plan(part("text", tmp_path / "a.txt", tokenizer="tokenizer"), length=2, vocabulary=4)
    code, message = refused(p, tmp_path)
    assert code == "SW6105" and "4" in message and "0 to 3" in message
    assert not list((tmp_path / "run" / "data").glob("*/manifest.json"))


def test_a_broken_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{")
    (tmp_path / "a.txt").write_text("the cat sat")
    assert (
        refused(plan(part("text", tmp_path / "a.txt", tokenizer="tokenizer")), tmp_path)[0]
        == "SW6121"
    )


def test_long_text_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwright.data.source_files.PIECE_BYTES", 5)
    text = "ab\ncdefé\n" + "ö" * 9 + "z"
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    block = every_row(opened(plan(part("text", tmp_path / "a.txt"), length=3), tmp_path))
    raw = text.encode()
    assert bytes(block.tokens.astype(np.uint8).reshape(-1)) == raw[: len(raw) // 3 * 3]
    assert block.starts is not None and block.starts.sum() == 1, "one document"


@pytest.mark.parametrize(
    ("kind", "content", "code", "told"),
    [
        ("text", b"caf\xe9 noir\n", "SW6107", "byte 0xe9 at offset 3"),
        ("text", b"", "SW6116", "all empty"),
        ("jsonl", b'{"text": "a"}\n{"text": "caf\xe9"}\n', "SW6107", ":2: byte 0xe9 at offset 27"),
        ("jsonl", b'{"text": "a"}\n{"text": \n', "SW6109", ":2: this line is not JSON"),
        ("jsonl", b'["a"]\n', "SW6109", ":1: this record is not a JSON object"),
        ("jsonl", b'{"text": "a"}\n\n{"body": "a"}\n', "SW6110", ":3: there is no 'text'"),
        ("jsonl", b'{"text": 5}\n', "SW6110", "holds a number"),
        ("jsonl", b'{"text": null}\n', "SW6110", "holds null"),
        ("jsonl", b"", "SW6116", "all empty"),
        ("jsonl", b'{"text": "' + b"[" * 100_000 + b'"}', None, ""),
        ("jsonl", b"[" * 100_000, "SW6109", "nested too deeply"),
        ("parquet", b"PAR1 and no more", "SW6117", "parquet"),
        ("parquet", b"", "SW6117", "parquet"),
        ("chat", b'{"messages": []}\n', "SW6111", ":1: the conversation has no messages"),
        ("chat", b'{"messages": "hello"}\n', "SW6111", ":1: the conversation has no messages"),
        ("chat", b'{"messages": [{"content": "a"}]}\n', "SW6111", "message 1 has no role"),
        ("chat", b'{"conversation": []}\n', "SW6110", "there is no 'messages'"),
    ],
)
def test_bad_files(tmp_path: Path, kind: str, content: bytes, code: str | None, told: str) -> None:
    name = tmp_path / ("data.parquet" if kind == "parquet" else "data.jsonl")
    name.write_bytes(content)
    p = plan(part(kind, name, template="{% for m in messages %}{{ m.content }}{% endfor %}"))
    if code is None:
        opened(p, tmp_path)
        return
    found, message = refused(p, tmp_path)
    assert found == code and told in message, (found, message)
    assert str(name) in message


def test_a_line_of_two_gigabytes_is_refused_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    with path.open("wb") as file:
        file.write(b'{"text": "a"}\n{"text": "')
        file.truncate(2 * 2**30)  # a hole: two gigabytes of zero bytes, and no line end
    tracemalloc.start()
    code, message = refused(plan(part("jsonl", path)), tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert code == "SW6108" and ":2:" in message
    assert peak < 300 * 2**20, peak


def test_files_that_are_not_there(tmp_path: Path) -> None:
    assert refused(plan(part("text", tmp_path / "none*.txt")), tmp_path)[0] == "SW6101"


@pytest.mark.parametrize(
    ("name", "array", "code"),
    [
        ("wide", np.zeros((4, 5), dtype=np.int32), "SW6103"),
        ("real", np.zeros((4, 4)), "SW6103"),
        ("few", np.zeros((1, 4), dtype=np.int32), "SW6104"),
        ("none", np.zeros((0, 4), dtype=np.int32), "SW6104"),
        ("high", np.full((4, 4), 256), "SW6105"),
        ("low", np.full((4, 4), -1), "SW6105"),
        ("pickled", np.array([[None] * 4] * 4, dtype=object), "SW6102"),
    ],
)
def test_arrays_that_do_not_fit(tmp_path: Path, name: str, array: np.ndarray, code: str) -> None:
    np.save(tmp_path / f"{name}.npy", array, allow_pickle=True)
    assert refused(plan(part("tokens", tmp_path / f"{name}.npy")), tmp_path)[0] == code
    (tmp_path / "text.npy").write_text("no array")
    assert refused(plan(part("tokens", tmp_path / "text.npy")), tmp_path)[0] == "SW6102"


def test_synthetic_rows_are_the_same_everywhere(tmp_path: Path) -> None:
    first, second = (every_row(opened(plan(part("synthetic")), tmp_path)).tokens for _ in range(2))
    assert np.array_equal(first, second)
    assert first.shape == (1024, 4)
    assert 0 <= first.min() <= first.max() < 256


def test_the_standard_library_is_there(tmp_path: Path) -> None:
    files = matching_files("python-stdlib", tmp_path)
    assert len(files) > 300
    assert not any("site-packages" in f or "/test/" in f for f in files)

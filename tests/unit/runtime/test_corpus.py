"""Text becomes rows: bytes and Hugging Face tokenizers, document starts, and what does not fit is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shardwright.diagnostics import Refusal
from shardwright.runtime.corpus import open_rows, prepare_rows, text_files


def plan(kind: str, path: str | None, *, tokenizer: str | None = None, length: int = 4, vocabulary: int = 256) -> Any:
    return SimpleNamespace(
        data=SimpleNamespace(kind=kind, path=path, tokenizer=tokenizer, packing=True, shuffle=False),
        training=SimpleNamespace(sequence_length=length, global_batch_size=2, seed=0),
        model=SimpleNamespace(vocabulary_size=vocabulary),
    )


def code_of(plan: Any, cache: Path) -> str:
    with pytest.raises(Refusal) as refusal:
        prepare_rows(plan, cache, cache)
        open_rows(plan, cache)
    assert refusal.value.diagnostics[0].help
    return refusal.value.diagnostics[0].code


def test_bytes_are_one_stream_with_document_starts(tmp_path: Path) -> None:
    for name, text in {"b.txt": "world!", "a.txt": "hello", "empty.txt": ""}.items():
        (tmp_path / name).write_text(text)
    p = plan("text", str(tmp_path / "*.txt"), tokenizer="byte")
    prepare_rows(p, tmp_path, tmp_path / "cache")
    rows = open_rows(p, tmp_path / "cache")
    assert bytes(rows.tokens.reshape(-1)) == b"hellowor", "in name order, cut into rows of 4, the rest dropped"
    assert rows.starts is not None
    assert rows.starts.astype(int).tolist() == [[1, 0, 0, 0], [0, 1, 0, 0]]
    assert not list((tmp_path / "cache").glob(".*")), "no half-written file stays"


def test_a_hugging_face_tokenizer_ends_documents(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<eos>": 0, "<unk>": 1, "the": 2, "cat": 3, "sat": 4}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>")
    fast.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "a.txt").write_text("the cat sat")
    (tmp_path / "b.txt").write_text("the dog sat")
    p = plan("text", str(tmp_path / "*.txt"), tokenizer="tokenizer", vocabulary=5)
    prepare_rows(p, tmp_path, tmp_path / "cache")
    assert open_rows(p, tmp_path / "cache").tokens.tolist() == [[2, 3, 4, 0], [2, 1, 4, 0]]


def test_the_standard_library_is_there() -> None:
    files = text_files("python-stdlib")
    assert len(files) > 300
    assert not any("site-packages" in f or "/test/" in f for f in files)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    assert code_of(plan("text", str(tmp_path / "none*.txt"), tokenizer="byte"), tmp_path / "1") == "SW6101"
    (tmp_path / "text.npy").write_text("no array")
    assert code_of(plan("tokens", str(tmp_path / "text.npy")), tmp_path) == "SW6102"
    for name, array, code in (
        ("wide", np.zeros((4, 5), dtype=np.int32), "SW6103"),
        ("real", np.zeros((4, 4)), "SW6103"),
        ("few", np.zeros((1, 4), dtype=np.int32), "SW6104"),
        ("high", np.full((4, 4), 256), "SW6105"),
        ("low", np.full((4, 4), -1), "SW6105"),
        ("pickled", np.array([[None] * 4] * 4, dtype=object), "SW6102"),
    ):
        np.save(tmp_path / f"{name}.npy", array, allow_pickle=True)
        assert code_of(plan("tokens", str(tmp_path / f"{name}.npy")), tmp_path) == code, name


def test_synthetic_rows_are_the_same_everywhere(tmp_path: Path) -> None:
    first, second = (open_rows(plan("synthetic", None), tmp_path).tokens for _ in range(2))
    assert np.array_equal(first, second)
    assert first.shape == (1024, 4)
    assert 0 <= first.min() <= first.max() < 256

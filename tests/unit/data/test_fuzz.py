"""A sample of mutated conversations, files, templates and tokenizers; `make prove` has 20,000 of
them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwright.data import conversations
from shardwright.data.chat_template import ChatTemplateRenderer
from tests.unit.data import fuzz
from tests.unit.data.chat_families import tokenizers
from tests.unit.data.data_plans import part, plan, refused


@pytest.fixture(autouse=True)
def short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A template that does not end takes a second, not ten."""
    monkeypatch.setattr(conversations, "_RENDERER", ChatTemplateRenderer(seconds=1))


def test_a_sample_of_mutated_data(tmp_path: Path) -> None:
    for mutate in (fuzz.fuzz_chat, fuzz.fuzz_parquet, fuzz.fuzz_files, fuzz.fuzz_templates):
        assert mutate(60, 1, _made(tmp_path / mutate.__name__))["rows"] > 1, "and some are read"
    tokenizers(_made(tmp_path / "saved"))
    assert (
        fuzz.fuzz_tokenizers(20, 1, _made(tmp_path / "tokenizers"), tmp_path / "saved")["rows"] > 1
    )


def test_a_tokenizer_that_fails_at_a_text_is_refused(tmp_path: Path) -> None:
    """Its files load; only the first text shows that a length is no number."""
    tokenizers(_made(tmp_path / "saved"))
    folder = tmp_path / "saved" / "byte-level"
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**config, "model_max_length": "many"})
    )
    (tmp_path / "a.txt").write_text("a text\n")
    assert (
        refused(plan(part("text", tmp_path / "a.txt", tokenizer=str(folder))), tmp_path)[0]
        == "SW6121"
    )


def test_a_parquet_file_with_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    """Arrow reads the file, and Python cannot make a string of it."""
    import pyarrow
    import pyarrow.parquet

    broken = pyarrow.array([b"\xff a"]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": broken}), tmp_path / "a.parquet")
    assert refused(plan(part("parquet", tmp_path / "a.parquet")), tmp_path)[0] == "SW6117"


@pytest.mark.prove
def test_twenty_thousand_mutated_inputs(
    tmp_path: Path, proved: Callable[[str, str, dict[str, Any]], None]
) -> None:
    tokenizers(_made(tmp_path / "saved"))
    found = {
        "conversations": fuzz.fuzz_chat(8_000, 2, _made(tmp_path / "chat")),
        "parquet": fuzz.fuzz_parquet(3_000, 2, _made(tmp_path / "parquet")),
        "data files": fuzz.fuzz_files(3_000, 2, _made(tmp_path / "files")),
        "chat templates": fuzz.fuzz_templates(4_000, 2, _made(tmp_path / "templates")),
        "tokenizers": fuzz.fuzz_tokenizers(
            2_000, 2, _made(tmp_path / "tokenizers"), tmp_path / "saved"
        ),
    }
    for name, totals in found.items():
        proved("fuzz", name, {**totals, "tracebacks": 0})


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder

"""The byte tokenizer as Hugging Face's files is the one that trained: ids are the bytes of UTF-8,
and back."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from shardwright.data.tokenizers import ByteTokenizer
from shardwright.models.byte_tokenizer import byte_tokenizer, write_byte_tokenizer

TEXTS = (
    "",
    " ",
    "  two  spaces\n\n\ttab\r\n\0",
    "Schön, e\u0301",
    "日本語🙂\u200d👩",
    "<|endoftext|><0x41>Ġ",
)


@given(st.text())
def test_any_text_is_its_bytes_and_comes_back(text: str) -> None:
    ours = ByteTokenizer()
    encoded = byte_tokenizer().encode(text)
    assert encoded.ids == list(text.encode()) == ours.encode([text])[0].tolist()
    assert byte_tokenizer().decode(encoded.ids, skip_special_tokens=False) == text
    places = ours.encode_with_offsets(text)
    assert [first for first, _ in encoded.offsets] == places.first.tolist()


@given(st.binary())
def test_any_bytes_are_the_text_that_the_training_tokenizer_makes_of_them(data: bytes) -> None:
    ids = np.frombuffer(data, dtype=np.uint8)
    assert byte_tokenizer().decode(
        ids.tolist(), skip_special_tokens=False
    ) == ByteTokenizer().decode(ids)


@pytest.mark.parametrize(
    "model_type", ["llama", "gpt2", "qwen3", "mistral", "gemma", "deepseek_v3", "bloom", "qwen2"]
)
def test_auto_tokenizer_loads_it_beside_a_model(model_type: str, tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    auto = AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=False)
    plain = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert len(auto) == len(plain) == 256 and auto.eos_token_id is None
    for text in TEXTS:
        assert plain(text)["input_ids"] == list(text.encode())
        assert auto.decode(list(text.encode())) == plain.decode(list(text.encode())) == text
        # transformers has a class of its own for some types, which composes characters (NFC).
        seen = unicodedata.normalize("NFC", text) if model_type == "qwen2" else text
        assert auto(text)["input_ids"] == list(seen.encode())

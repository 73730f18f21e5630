"""The tokenizer of `data.tokenizer: byte` as Hugging Face's files: a token a byte of UTF-8, ids are
the bytes' values.

Byte-level BPE without a merge is that. No special tokens: all 256 ids are taken.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "clean_up_tokenization_spaces": False,
    # Some types' own classes would add theirs, as a 257th token.
    **{f"{kind}_token": None for kind in ("bos", "eos", "unk", "pad")},
}


def write_byte_tokenizer(folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json, for AutoTokenizer.from_pretrained."""
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(_CONFIG, indent=2) + "\n", encoding="utf-8"
    )


def byte_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(
        models.BPE(vocab={sign: byte for byte, sign in enumerate(_signs())}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _signs() -> list[str]:
    """The printable character that byte-level BPE writes for each byte: its own where Latin-1 has
    one, else the next from U+0100 on (GPT-2's bytes_to_unicode)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]

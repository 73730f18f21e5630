"""Build the tokenizer of `data.tokenizer: byte` for transformers: one token a byte of UTF-8, ids
are byte values.

It is byte-level BPE without merges. It has no special tokens: all 256 ids are taken.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "clean_up_tokenization_spaces": False,
    # Otherwise the tokenizer classes of some types add a 257th token.
    **{f"{kind}_token": None for kind in ("bos", "eos", "unk", "pad")},
}


def write_byte_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, for AutoTokenizer.from_pretrained."""
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(_CONFIG, indent=2) + "\n", encoding="utf-8"
    )


def byte_tokenizer() -> Tokenizer:
    # The printable character of each byte in byte-level BPE (GPT-2's bytes_to_unicode).
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    signs = [chr(byte if byte in printable else next(others)) for byte in range(256)]
    tokenizer = Tokenizer(
        models.BPE(vocab={sign: byte for byte, sign in enumerate(signs)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer

"""Wrap the byte tokenizer and transformers' tokenizers, which are imported on use."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from shardwright.diagnostics import Refusal, refusal
from shardwright.models.tokenizer_packages import INSTALL, missing_packages

Ids = npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """Hold a text's tokens.

    ids: (n,).
    first, last: (n,) range [first, last) of characters that each token stands for.
    """

    ids: Ids
    first: npt.NDArray[np.int64]
    last: npt.NDArray[np.int64]


_CONTROL = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")
_SURROGATE = re.compile("[\ud800-\udfff]")


def without_surrogates(text: str) -> str:
    """Replace each unpaired surrogate by U+FFFD, which UTF-8 can hold; the length stays."""
    return text if text.isascii() else _SURROGATE.sub("\ufffd", text)


class ByteTokenizer:
    def __init__(self) -> None:
        self.size, self.dtype = 256, "uint8"
        self.template: str | None = None
        self.begin: list[int] = []
        self.end: list[int] = []
        self.bos: int | None = None
        self.pad: int | None = None

    def encode(self, texts: list[str]) -> list[Ids]:
        return [
            np.frombuffer(without_surrogates(text).encode("utf-8"), dtype=np.uint8)
            for text in texts
        ]

    def encode_with_offsets(self, text: str) -> Encoded:
        text = without_surrogates(text)
        sizes = [len(character.encode("utf-8")) for character in text]
        places = np.repeat(np.arange(len(text), dtype=np.int64), sizes)
        return Encoded(ids=self.encode([text])[0], first=places, last=places + 1)

    def decode(self, ids: Ids) -> str:
        return ids.astype(np.uint8).tobytes().decode("utf-8", "replace")

    def special(self) -> dict[str, str]:
        return {}

    def is_special_token(self, token: int) -> bool:
        return False


class TransformersTokenizer:
    """Read a transformers tokenizer from a folder."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self.folder = folder
        self._hf = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        self.size = len(self._hf)
        self.end = [] if self._hf.eos_token_id is None else [int(self._hf.eos_token_id)]
        self.bos = None if self._hf.bos_token_id is None else int(self._hf.bos_token_id)
        self.pad = None if self._hf.pad_token_id is None else int(self._hf.pad_token_id)
        self.dtype = "uint16" if self.size <= 2**16 else "int32"
        template = self._hf.chat_template
        # Some tokenizers name several templates: for tools, for retrieval.
        self.template = cast(
            "str | None", template.get("default") if isinstance(template, dict) else template
        )

    @functools.cached_property
    def begin(self) -> list[int]:
        """Return the ids that the post-processor puts before a text: <bos>, GLM's [gMASK]<sop>, or
        none."""
        bare = self._encoding("a")["input_ids"]
        ids = [int(i) for i in self._encoding("a", add_special_tokens=True)["input_ids"]]
        places = (
            n for n in range(len(ids) - len(bare) + 1) if ids[n : n + len(bare)] == list(bare)
        )
        return ids[: next(places, 0)]

    def encode(self, texts: list[str]) -> list[Ids]:
        encoded = self._encoding(texts)["input_ids"] if texts else []
        return [np.asarray(ids, dtype=np.int32) for ids in encoded]

    def encode_with_offsets(self, text: str) -> Encoded:
        if not self._hf.is_fast:
            raise refusal(
                "SW6113",
                f"data.train_on needs a fast tokenizer, and {type(self._hf).__name__} is a slow "
                "one: its tokens have no character offsets",
                "Convert the tokenizer to a fast one (tokenizer.json) and compile again, or set "
                "data.train_on: all.",
            )
        encoded = self._encoding(text, return_offsets_mapping=True)
        places = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        return Encoded(
            ids=np.asarray(encoded["input_ids"], dtype=np.int32),
            first=places[:, 0],
            last=places[:, 1],
        )

    def _encoding(self, text: str | list[str], **more: bool) -> Any:
        """Tokenize. Raises SW6121: some errors in a tokenizer's files show only at the first text
        that meets them."""
        text = (
            without_surrogates(text)
            if isinstance(text, str)
            else [without_surrogates(one) for one in text]
        )
        try:
            return self._hf(text, verbose=False, **({"add_special_tokens": False} | more))
        except Exception as error:  # a broken file may make it raise anything
            raise _unusable(self.folder, error) from None

    def decode(self, ids: Ids) -> str:
        return str(
            self._hf.decode(
                ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def special(self) -> dict[str, str]:
        """Return the tokens that a chat template may name: bos_token and the like."""
        return special_tokens(self._hf)

    def is_special_token(self, token: int) -> bool:
        """Return whether the id stands for a token such as <|im_end|>, not for text."""
        known = token in self._hf.all_special_ids or token in self._hf.added_tokens_decoder
        return known or bool(_CONTROL.fullmatch(self.decode(np.asarray([token])).strip()))


def special_tokens(tokenizer: Any) -> dict[str, str]:
    """Return the special tokens of a transformers tokenizer by name."""
    return {
        name: str(token)
        for name, token in tokenizer.special_tokens_map.items()
        if isinstance(token, str)
    }


Tokenizer = ByteTokenizer | TransformersTokenizer
"""begin, end: ids before and after each document.
bos, pad: ids of bos_token and pad_token, or None.
dtype: the smallest type that holds every id.
template: Jinja2, or None.
"""


def document_prefix(tokenizer: Tokenizer, add_bos_token: bool | str) -> list[int]:
    """Return the ids before each document. Raises SW6152.

    add_bos_token: the recipe's.
    """
    if add_bos_token == "auto" or (add_bos_token and tokenizer.begin):
        return tokenizer.begin
    if not add_bos_token:
        return []
    if tokenizer.bos is None:
        raise refusal(
            "SW6152",
            "data.add_bos_token is true, but the tokenizer has no bos_token",
            "Set one in tokenizer_config.json, or set `add_bos_token: auto`.",
        )
    return [tokenizer.bos]


@functools.lru_cache(maxsize=4)
def load_tokenizer(name: str, folder: Path) -> Tokenizer:
    """Load a tokenizer. Raises SW6121.

    name: "byte", or a folder relative to the compiled folder.
    """
    if name == "byte":
        return ByteTokenizer()
    try:
        return TransformersTokenizer(folder / name)
    except Exception as error:  # a broken file may make it raise anything
        raise _unusable(folder / name, error) from None


def _unusable(folder: Path, error: Exception) -> Refusal:
    if missing := missing_packages(folder):
        return refusal(
            "SW6121",
            f"the tokenizer in {str(folder)!r} has no tokenizer.json, and needs the package "
            f"{' and '.join(missing)}, which is not installed",
            (
                f"Run {INSTALL}, or save the tokenizer once with a tokenizer.json "
                "(`save_pretrained` of transformers' AutoTokenizer)."
            ),
        )
    lines = str(error).strip().splitlines() or [type(error).__name__]
    why = (
        "it needs its own Python code, which is not run"
        if "trust_remote_code" in str(error)
        else lines[0][:300]
    )
    return refusal(
        "SW6121",
        f"the tokenizer in {str(folder)!r} cannot be used: {why}",
        "Compile again with a data.tokenizer that AutoTokenizer.from_pretrained loads.",
    )

"""Holds the two kinds of tokenizer. transformers is imported only where one of its own is asked
for."""

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
    """Holds a text's tokens. ids: (n,); first, last: (n,) the characters of the text that each
    token stands for, [first, last)."""

    ids: Ids
    first: npt.NDArray[np.int64]
    last: npt.NDArray[np.int64]


_CONTROL = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")
_SURROGATE = re.compile("[\ud800-\udfff]")


def without_surrogates(text: str) -> str:
    """Writes U+FFFD for each half of a surrogate pair: JSON may hold one alone (of a cut emoji),
    UTF-8 cannot. The text keeps its length."""
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
    """Reads one of transformers' tokenizers from a folder."""

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
        # Several by name: for tools, for retrieval.
        self.template = cast(
            "str | None", template.get("default") if isinstance(template, dict) else template
        )

    @functools.cached_property
    def begin(self) -> list[int]:
        """Returns what the post-processor puts in front of a text: <bos>, GLM's [gMASK]<sop>, or
        nothing."""
        bare = self._encoding("a")["input_ids"]
        ids = [int(i) for i in self._encoding("a", add_special_tokens=True)["input_ids"]]
        places = (
            n for n in range(len(ids) - len(bare) + 1) if ids[n : n + len(bare)] == list(bare)
        )
        return ids[: next(places, 0)]

    def encode(self, texts: list[str]) -> list[Ids]:
        found = self._encoding(texts)["input_ids"] if texts else []
        return [np.asarray(ids, dtype=np.int32) for ids in found]

    def encode_with_offsets(self, text: str) -> Encoded:
        if not self._hf.is_fast:
            raise refusal(
                "SW6113",
                f"{type(self._hf).__name__} does not say which characters a token stands for",
                (
                    "Save a fast tokenizer (tokenizer.json) and compile with it, or write "
                    "train_on: all."
                ),
            )
        found = self._encoding(text, return_offsets_mapping=True)
        places = np.asarray(found["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        return Encoded(
            ids=np.asarray(found["input_ids"], dtype=np.int32),
            first=places[:, 0],
            last=places[:, 1],
        )

    def _encoding(self, text: str | list[str], **more: bool) -> Any:
        """Some mistakes of a tokenizer's files show at the first text that meets them. Raises
        Refusal (SW6121)."""
        text = (
            without_surrogates(text)
            if isinstance(text, str)
            else [without_surrogates(one) for one in text]
        )
        try:
            return self._hf(text, verbose=False, **({"add_special_tokens": False} | more))
        except Exception as error:  # whatever a broken file makes the tokenizer's code raise
            raise _unusable(self.folder, error) from None

    def decode(self, ids: Ids) -> str:
        return str(
            self._hf.decode(
                ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def special(self) -> dict[str, str]:
        """Returns what a chat template may name: bos_token and the like."""
        return special_tokens(self._hf)

    def is_special_token(self, token: int) -> bool:
        """Whether the id stands for a token such as <|im_end|>, and not for a piece of text."""
        known = token in self._hf.all_special_ids or token in self._hf.added_tokens_decoder
        return known or bool(_CONTROL.fullmatch(self.decode(np.asarray([token])).strip()))


def special_tokens(tokenizer: Any) -> dict[str, str]:
    """Returns the special tokens by name. tokenizer: transformers' own."""
    return {
        name: str(token)
        for name, token in tokenizer.special_tokens_map.items()
        if isinstance(token, str)
    }


Tokenizer = ByteTokenizer | TransformersTokenizer
"""begin, end: the ids in front of and behind each document; bos, pad: the ids of its bos_token and
pad_token, None for none; dtype: the smallest that holds every id; template: Jinja2, None for
none."""


def document_prefix(tokenizer: Tokenizer, add_bos_token: bool | str) -> list[int]:
    """Returns the ids in front of each document. add_bos_token: of the recipe. Raises Refusal
    (SW6152)."""
    if add_bos_token == "auto" or (add_bos_token and tokenizer.begin):
        return tokenizer.begin
    if not add_bos_token:
        return []
    if tokenizer.bos is None:
        raise refusal(
            "SW6152",
            "data.add_bos_token is true, and the tokenizer has no bos_token",
            "Name one in tokenizer_config.json, or write `add_bos_token: auto`.",
        )
    return [tokenizer.bos]


@functools.lru_cache(maxsize=4)
def load_tokenizer(name: str, folder: Path) -> Tokenizer:
    """Loads a tokenizer. name: "byte", or a folder relative to the compiled folder. Raises Refusal
    (SW6121)."""
    if name == "byte":
        return ByteTokenizer()
    try:
        return TransformersTokenizer(folder / name)
    except Exception as error:  # whatever a broken file makes the tokenizer's code raise
        raise _unusable(folder / name, error) from None


def _unusable(folder: Path, error: Exception) -> Refusal:
    if missing := missing_packages(folder):
        return refusal(
            "SW6121",
            f"the tokenizer in {str(folder)!r} has no tokenizer.json, and needs the package "
            f"{' and '.join(missing)}, which is not installed",
            (
                f"{INSTALL}, or save it once with a tokenizer.json (`save_pretrained` of "
                "transformers' AutoTokenizer)."
            ),
        )
    lines = str(error).strip().splitlines() or [type(error).__name__]
    why = (
        "it is Python code of its own, which is not run"
        if "trust_remote_code" in str(error)
        else lines[0][:300]
    )
    return refusal(
        "SW6121",
        f"the tokenizer in {str(folder)!r} cannot be used: {why}",
        "Compile again with a data.tokenizer that AutoTokenizer.from_pretrained loads.",
    )

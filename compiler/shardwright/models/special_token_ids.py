"""Which token ids of a configuration are plain text, which are special there, and which stand for
something else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from shardwright.models.tiny_config import VOCABULARY

_IN_TEXT = ("pad", "bos", "eos", "unk", "sep", "cls", "mask")
"""Beginnings of the names of ids that a text may hold."""
_ENDINGS = ("_token_id", "_token_index", "_patch_id", "_token_ids", "_start_id", "_end_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenIds:
    """plain: mean nothing special, ascending. special: each id with a meaning of its own in a text,
    the first id and the last one. In neither: those that stand for an image, audio or the like."""

    plain: tuple[int, ...]
    special: tuple[int, ...]


def token_ids(config: PretrainedConfig) -> TokenIds:
    """Read the ids of `config` and of the configurations inside of it, by name."""
    text = config.get_text_config(decoder=True)
    size = int(
        getattr(text, "vocab_size", None) or getattr(config, "vocab_size", None) or VOCABULARY
    )
    named = [(name, number) for name, number in _named(config.to_dict()) if 0 <= number < size]
    others = {number for name, number in named if not name.startswith(_IN_TEXT)}
    inside = {number for name, number in named if name.startswith(_IN_TEXT)}
    special = sorted(({0, size - 1} | inside) - others)
    plain = tuple(number for number in range(size) if number not in others and number not in inside)
    return TokenIds(plain=plain[1:-1], special=tuple(special))


def _named(document: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """(name, id) of each key that names token ids, one or a list of them."""
    for name, value in document.items():
        if isinstance(value, dict):
            yield from _named(value)
        elif isinstance(name, str) and (
            name.endswith(_ENDINGS) or name in ("image_token", "video_token", "audio_token")
        ):
            for number in value if isinstance(value, list) else [value]:
                if type(number) is int:
                    yield name, number

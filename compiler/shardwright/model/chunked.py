"""Which types' heads run chunk by chunk: what tests/zoo/test_chunked.py proved, read without torch."""

from __future__ import annotations

import functools
import json
from importlib import resources


@functools.cache
def _table() -> frozenset[str]:
    text = resources.files("shardwright.model").joinpath("chunked_proved.json").read_text(encoding="utf-8")
    return frozenset(json.loads(text))


def proved_chunked(model_type: str) -> bool:
    return model_type in _table()

"""Which types keep packed documents apart: what tests/zoo/test_packing.py proved, read without torch."""

from __future__ import annotations

import functools
import json
from importlib import resources


@functools.cache
def proved_table() -> dict[str, list[str]]:
    """Model type -> attention implementations. One dictionary a process: a test may override an entry."""
    text = resources.files("shardwright.model").joinpath("packing_proved.json").read_text(encoding="utf-8")
    table: dict[str, list[str]] = json.loads(text)
    return table


def proved_packing(model_type: str, attention: str) -> bool:
    """attention: eager or sdpa, as the model will run."""
    return attention in proved_table().get(model_type, ())

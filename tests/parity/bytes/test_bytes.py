"""The bytes that collectives move in a real run are those that the planner counts, to the byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.parity.harness import Case
from tests.parity.launched import launched

pytestmark = [pytest.mark.prove, pytest.mark.launch]

TWO: dict[str, Case] = {
    "expert": Case(model="mixtral", data=2, expert=2),
    "context": Case(model="llama", context=2, checkpointing="full"),
    "zero2-expert": Case(model="qwen3_moe", data=2, expert=2, zero_stage=2),
    "zero3": Case(model="llama", context=2, zero_stage=3),
}
FOUR: dict[str, Case] = {
    "both": Case(model="mixtral", context=2, data=2, expert=2),
    "pipeline": Case(model="mixtral", context=2, expert=2, pipeline=2),
    "tensor": Case(model="llama", context=2, tensor=2, zero_stage=2),
}


@pytest.mark.parametrize("cases", [TWO, FOUR], ids=["two-ranks", "four-ranks"])
def test_what_moves_is_what_was_planned(
    cases: dict[str, Case], tmp_path: Path, proved: Callable[[str, str, dict[str, Any]], None]
) -> None:
    found = launched(cases, tmp_path, "bytes_worker.py")
    for name, figures in found.items():
        proved("bytes", name, figures)
    off = {name: {k: v for k, v in line.items() if k.endswith(" off") and v} for name, line in found.items()}
    assert off == {name: {} for name in cases}, found
    assert found["both" if "both" in cases else "expert"]["rows"] > 0
    assert all(line["trades"] > 0 for name, line in found.items() if cases[name].context > 1)

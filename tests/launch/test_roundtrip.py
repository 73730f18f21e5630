"""A Hugging Face folder goes through the engines untrained and comes out the same bytes; trained,
it is the run's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwright.utils.numeric_difference import largest_difference
from tests.launch.roundtrip import LAYOUTS, TYPES, round_trips

pytestmark = pytest.mark.launch


def check(found: dict[str, dict[str, Any]]) -> None:
    assert {case for case, figures in found.items() if not figures["same_bytes"]} == set()
    assert largest_difference(figures["logits"] for figures in found.values()) <= 1e-5, found


@pytest.mark.prove
def test_ten_types(tmp_path: Path) -> None:
    """Each type in one layout, every layout."""
    layouts = list(LAYOUTS)
    check(round_trips([(t, layouts[i % len(layouts)]) for i, t in enumerate(TYPES)], tmp_path))


@pytest.mark.prove
def test_ten_types_in_every_layout(
    tmp_path: Path, proved: Callable[[str, str, dict[str, Any]], None]
) -> None:
    found = round_trips([(t, layout) for t in TYPES for layout in LAYOUTS], tmp_path)
    for case, figures in found.items():
        proved("roundtrip", case, figures)
    check(found)

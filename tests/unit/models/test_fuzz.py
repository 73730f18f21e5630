"""A sample of mutated model folders; `make prove` has more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.models.fuzz import fuzz_model_configs, fuzz_weight_files


def test_a_sample_of_mutated_model_folders(tmp_path: Path) -> None:
    assert fuzz_weight_files(100, 1, tmp_path)["ok"] > 2
    assert fuzz_model_configs(8, 1, tmp_path)["mutations"] == 8


@pytest.mark.prove
def test_mutated_model_folders(
    tmp_path: Path, proved: Callable[[str, str, dict[str, Any]], None]
) -> None:
    proved("fuzz", "weight files", {**fuzz_weight_files(4_000, 2, tmp_path), "tracebacks": 0})
    proved(
        "fuzz", "model configurations", {**fuzz_model_configs(1_000, 2, tmp_path), "tracebacks": 0}
    )

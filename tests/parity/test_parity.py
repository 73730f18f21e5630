"""Every layout trains as one plain Hugging Face process does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.cases import CASES, SAMPLE
from tests.parity.harness import compare


@pytest.mark.launch
@pytest.mark.parametrize("name", SAMPLE)
def test_layout_trains_like_one_process(name: str, tmp_path: Path) -> None:
    compare(CASES[name], tmp_path)

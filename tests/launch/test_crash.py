"""kill -9 of a random rank at a random moment, saves included: the run goes on as if nothing had
been."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.launch.crashes import compare, crashed, uninterrupted
from tests.parity.harness import Case

pytestmark = pytest.mark.launch

SMALL = {
    "llama-dp2": Case(model="llama", data=2),
    "gpt2-pp2": Case(model="gpt2", pipeline=2, accumulation=2),
    "llama-zero3-dp2": Case(model="llama", data=2, zero_stage=3),
    "mixtral-s2-e2": Case(model="mixtral", context=2, expert=2),
    "mixtral-pp2-dp2-e2": Case(model="mixtral", pipeline=2, data=2, expert=2),
}


@pytest.mark.prove
def test_three_kills(tmp_path: Path) -> None:
    whole = uninterrupted(SMALL["llama-dp2"], tmp_path)
    out, _ = crashed(SMALL["llama-dp2"], tmp_path, kills=3, seed=1)
    compare(whole, out)


@pytest.mark.prove
@pytest.mark.parametrize("name", SMALL)
def test_ten_kills(
    name: str, tmp_path: Path, proved: Callable[[str, str, dict[str, Any]], None]
) -> None:
    """Two runs of five kills each."""
    whole = uninterrupted(SMALL[name], tmp_path)
    for seed in (1, 2):
        out, moments = crashed(SMALL[name], tmp_path, kills=5, seed=seed)
        compare(whole, out)
        proved(
            "crash",
            f"{name}, seed {seed}",
            {"kills": moments, "same_losses": True, "each_sample_once": True},
        )

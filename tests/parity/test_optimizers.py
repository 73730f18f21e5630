"""A sample of each optimizer's layouts, in one launch; `make prove` runs all of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.parity import test_adafactor, test_adamw_8bit, test_lion, test_muon
from tests.parity.case_launches import launched
from tests.parity.harness import Case
from tests.parity.optimizer_worker import RESUMED
from tests.parity.plain_optimizers import assert_as_one_process

CHOSEN: tuple[tuple[Mapping[str, Case], tuple[str, ...]], ...] = (
    (
        test_muon.TWO,
        ("llama-zero1", "gpt2-tp2-zero0", "gpt-neox-tp2", "resumed-qwen3-moe-zero3"),
    ),
    (test_lion.TWO, ("llama-tied-zero3", "resumed-llama-tp2")),
    (test_adafactor.TWO, tuple(test_adafactor.TWO)[1::4]),
    (test_adamw_8bit.TWO, tuple(test_adamw_8bit.TWO)[1::4]),
)


def named(name: str, case: Case) -> str:
    """The worker resumes the cases whose names say so."""
    start = RESUMED if name.startswith(RESUMED) else ""
    return f"{start}{case.optimizer}-{name.removeprefix(RESUMED)}"


SAMPLE = {named(name, cases[name]): cases[name] for cases, names in CHOSEN for name in names}


@pytest.mark.launch
def test_trains_as_one_process(tmp_path: Path) -> None:
    found = launched(SAMPLE, tmp_path, "optimizer_worker.py")
    assert {case.optimizer for case in SAMPLE.values()} >= {"muon", "lion", "adamw_8bit"}
    assert_as_one_process(found)

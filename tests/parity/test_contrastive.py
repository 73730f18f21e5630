"""CLIP and SigLIP over data ranks train as one process does on the whole batch: losses, norms and
weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.parity.case_launches import launched
from tests.parity.contrastive import MODELS, PairCase
from tests.parity.harness import LOSS_ABSOLUTE, NORM_RELATIVE, WEIGHT_ABSOLUTE

pytestmark = pytest.mark.launch

FEW_STEPS = 4
"""Of what each `make test-more` runs."""
SAMPLE = {
    "clip dp2 zero3": PairCase("clip", zero_stage=3, checkpointing="full"),
    "siglip dp2 zero1": PairCase("siglip", zero_stage=1),
}


def cases(data: int) -> dict[str, PairCase]:
    found = {
        f"{model} dp{data} zero{stage}": PairCase(
            model, data=data, zero_stage=stage, checkpointing="full" if stage == 2 else "none"
        )
        for model in MODELS
        for stage in range(4)
    }
    return {
        **found,
        f"clip dp{data} zero2 tower frozen": PairCase(
            "clip", data=data, zero_stage=2, freeze=("vision",)
        ),
    }


def check(cases: dict[str, PairCase], out: Path) -> dict[str, dict[str, float]]:
    found = launched(cases, out, "contrastive_worker.py")
    for name, figures in found.items():
        assert figures["loss"] <= LOSS_ABSOLUTE, (name, figures)
        assert figures["norm"] <= NORM_RELATIVE, (name, figures)
        assert figures["weights"] <= WEIGHT_ABSOLUTE, (name, figures)
    return found


@pytest.mark.prove
def test_two_ranks_train_as_one(tmp_path: Path) -> None:
    check(
        {name: dataclasses.replace(case, steps=FEW_STEPS) for name, case in SAMPLE.items()},
        tmp_path,
    )


@pytest.mark.prove
@pytest.mark.parametrize("data", [2, 4])
def test_every_stage(
    data: int, tmp_path: Path, proved: Callable[[str, str, dict[str, Any]], None]
) -> None:
    for name, figures in check(cases(data), tmp_path).items():
        proved("contrastive-parity", name, figures)

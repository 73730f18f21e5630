"""Models that see train as plain Hugging Face does, with none, one or two pictures of several sizes in a row: in a
pipeline, and over data ranks of which some have no picture in a micro-batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.harness import LOSS_ABSOLUTE, NORM_RELATIVE
from tests.parity.launched import launched
from tests.parity.sight import MODELS, SightCase

pytestmark = pytest.mark.launch

SAMPLE = {
    "qwen2_5_vl pp2": SightCase("qwen2_5_vl", pipeline=2, micro=2),
    "qwen3_vl pp2": SightCase("qwen3_vl", pipeline=2, micro=2, checkpointing="full"),
    "gemma3 pp2 tied": SightCase("gemma3", pipeline=2, tied=True),
    "llava dp2 zero3": SightCase("llava", data=2, zero_stage=3),
    "qwen2_5_vl dp2 zero2": SightCase("qwen2_5_vl", data=2, zero_stage=2),
}
ALL = {
    f"{model} {name}": SightCase(model, **fields)
    for model in MODELS
    for name, fields in {
        "pp2": {"pipeline": 2, "micro": 2},
        "dp2 zero0": {"data": 2, "zero_stage": 0},
        "dp2 zero1": {"data": 2, "zero_stage": 1},
        "dp2 zero2": {"data": 2, "zero_stage": 2},
        "dp2 zero3": {"data": 2, "zero_stage": 3, "checkpointing": "full"},
    }.items()
}


def check(cases: dict[str, SightCase], out: Path) -> None:
    for name, figures in launched(cases, out, "sight_worker.py").items():
        assert figures["loss"] <= LOSS_ABSOLUTE, (name, figures)
        assert figures["norm"] <= NORM_RELATIVE, (name, figures)


def test_two_ranks_train_as_one(tmp_path: Path) -> None:
    check(SAMPLE, tmp_path)


@pytest.mark.prove
def test_every_layout_of_two_ranks(tmp_path: Path) -> None:
    check(ALL, tmp_path)


@pytest.mark.prove
def test_a_pipeline_over_data_ranks(tmp_path: Path) -> None:
    check({f"{model} pp2 dp2": SightCase(model, pipeline=2, data=2) for model in MODELS}, tmp_path)

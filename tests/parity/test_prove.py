"""The full counts of parity and resume: `make prove`. About 20 s a case on two cores."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.launch.resume import continues_bit_for_bit
from tests.parity.cases import CASES
from tests.parity.harness import Case, compare
from tests.parity.wide_layouts import WIDE

pytestmark = [pytest.mark.prove, pytest.mark.launch]

Record = Callable[[str, str, dict[str, Any]], None]


@pytest.mark.parametrize("name", CASES)
def test_parity(name: str, tmp_path: Path, proved: Record) -> None:
    case = CASES[name]
    proved(
        "parity", name, {**dataclasses.asdict(case), **dataclasses.asdict(compare(case, tmp_path))}
    )


@pytest.mark.parametrize("name", WIDE)
def test_wide_parity(name: str, tmp_path: Path, proved: Record) -> None:
    """Expert ranks and context ranks beside all else that a layout has."""
    case = WIDE[name]
    proved(
        "parity-wide",
        name,
        {**dataclasses.asdict(case), **dataclasses.asdict(compare(case, tmp_path))},
    )


RESUMES = {
    "gpt2-dropout-pp2-tp2": Case(
        model="gpt2-dropout", pipeline=2, tensor=2, checkpointing="selective"
    ),
    "gpt2-zero0": Case(model="gpt2", data=2, zero_stage=0),
    "llama-dp2-zero1": Case(model="llama", data=2),
    "llama-dp2-zero2": Case(model="llama", data=2, zero_stage=2),
    "llama-tp2-dp2-zero3": Case(model="llama", tensor=2, data=2, zero_stage=3),
    "gpt2-offload-dp2-zero2": Case(model="gpt2", data=2, zero_stage=2, offload="optimizer"),
    "llama-offload-dp2-zero3": Case(model="llama", data=2, zero_stage=3, offload="parameters"),
    "llama-pp2-dp2": Case(model="llama", pipeline=2, data=2),
    "gpt2-dualpipev-pp2": Case(model="gpt2", pipeline=2, schedule="dualpipev", accumulation=4),
    "llama-bf16-pp2-tp2": Case(model="llama", pipeline=2, tensor=2, precision="bf16"),
    "llama-bf16-dp2-zero3": Case(model="llama", data=2, zero_stage=3, precision="bf16"),
}


@pytest.mark.parametrize("name", RESUMES)
def test_resume(name: str, tmp_path: Path, proved: Record) -> None:
    continues_bit_for_bit(RESUMES[name], tmp_path)
    proved("resume", name, {**dataclasses.asdict(RESUMES[name]), "bit_for_bit": True})

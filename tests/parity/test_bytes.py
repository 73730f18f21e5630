"""The bytes that collectives move in a real run are those that the planner counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.parity.case_launches import launched
from tests.parity.harness import Case

pytestmark = [pytest.mark.prove, pytest.mark.launch]

TWO: dict[str, Case] = {
    "zero1": Case(model="llama", data=2),
    "zero2": Case(model="gpt2", data=2, zero_stage=2),
    "zero3": Case(model="llama", data=2, zero_stage=3),
    "zero3-full": Case(model="llama", data=2, zero_stage=3, checkpointing="full"),
    "zero3-context": Case(model="llama", context=2, zero_stage=3),
    "tensor": Case(model="llama", tensor=2),
    "tensor-full": Case(model="llama", tensor=2, checkpointing="full"),
    "tensor-selective": Case(model="gpt2", tensor=2, checkpointing="selective"),
    "pipeline": Case(model="llama", pipeline=2),
    "pipeline-tied": Case(model="llama-tied", pipeline=2),
    "expert": Case(model="mixtral", data=2, expert=2),
    "expert-full": Case(model="mixtral", data=2, expert=2, checkpointing="full"),
    "expert-zero2": Case(model="qwen3_moe", data=2, expert=2, zero_stage=2),
    "expert-zero3": Case(model="qwen3_moe", data=2, expert=2, zero_stage=3),
    "context": Case(model="llama", context=2),
    "context-full": Case(model="llama", context=2, checkpointing="full"),
    "context-selective": Case(model="llama", context=2, checkpointing="selective"),
    "muon-zero0": Case(model="llama", data=2, zero_stage=0),
    "muon-zero1": Case(model="llama", data=2),
    "muon-zero2": Case(model="gpt2-wide", data=2, zero_stage=2),
    "muon-zero3": Case(model="llama", data=2, zero_stage=3),
    "muon-tensor": Case(model="llama", tensor=2),
    "muon-pipeline": Case(model="llama-tied", pipeline=2),
    "muon-context": Case(model="llama", context=2),
    "muon-experts": Case(model="qwen3_moe-wide", data=2),
    "muon-expert": Case(model="qwen3_moe-wide", data=2, expert=2),
    "muon-cut": Case(model="dense-first-wide", data=2),
    "kto-zero3": Case(model="llama", data=2, zero_stage=3, accumulation=3),
    "kto-tensor": Case(model="llama", tensor=2),
    "kto-pipeline": Case(model="llama", pipeline=2),
    "kto-context": Case(model="llama", context=2),
    "kto-expert-zero3": Case(model="qwen3_moe", data=2, expert=2, zero_stage=3),
}
REUSE: dict[str, Case] = {
    f"{checkpointing}-live-{live}": Case(
        model="llama", data=2, zero_stage=3, checkpointing=checkpointing
    )
    for checkpointing, numbers in {
        "none": (0, 20_000, 50_000, 100_000),
        "full": (0, 20_000, 75_000, 250_000),
    }.items()
    for live in numbers
} | {
    f"kto-{checkpointing}-live-{live}": Case(
        model="llama", data=2, zero_stage=3, checkpointing=checkpointing
    )
    for checkpointing, live in (("none", 0), ("none", 100_000), ("full", 0))
}
"""Distances within which ZeRO-3 leaves weights whole, of a model of 156,352 elements."""
ORDER = 0.08
"""How far the gathers may be off where such a distance ends inside a layer: autograd decides which
of two matrices that take the same input goes backward first, and the planner takes it for the last
one."""
FOUR: dict[str, Case] = {
    "both": Case(model="mixtral", context=2, data=2, expert=2),
    "pipeline-both": Case(model="mixtral", context=2, expert=2, pipeline=2),
    "tensor-context": Case(model="llama", context=2, tensor=2, zero_stage=2),
    "tensor-pipeline": Case(model="llama", tensor=2, pipeline=2),
    "dualpipev": Case(model="llama-deep", pipeline=2, data=2, schedule="dualpipev", accumulation=4),
    "context-4": Case(model="llama", context=4),
    "muon-zero1-4": Case(model="llama", data=4),
    "muon-tensor-zero1": Case(model="gpt2-wide", tensor=2, data=2),
    "muon-expert-zero2": Case(model="qwen3_moe-wide", data=4, expert=2, zero_stage=2),
    "muon-pipeline-zero1": Case(model="llama", pipeline=2, data=2),
    "kto-tensor-pipeline": Case(model="llama", tensor=2, pipeline=2),
    "kto-dualpipev": Case(
        model="llama-deep", pipeline=2, data=2, schedule="dualpipev", accumulation=4
    ),
}


Record = Callable[[str, str, dict[str, Any]], None]


@pytest.mark.parametrize("cases", [TWO, FOUR], ids=["two-ranks", "four-ranks"])
def test_what_moves_is_what_was_planned(
    cases: dict[str, Case], tmp_path: Path, proved: Record
) -> None:
    found = counted(cases, tmp_path, proved)
    off = {
        name: {k: v for k, v in line.items() if k.endswith(" off") and v}
        for name, line in found.items()
    }
    assert off == {name: {} for name in cases}, found
    moved = {
        name: {k for k, v in line.items() if v and k.endswith(" counted")}
        for name, line in found.items()
    }
    assert all(moved.values())
    for name, case in cases.items():
        assert ("expert_all_to_all counted" in moved[name]) == (case.expert > 1)
        assert ("context_all_to_all counted" in moved[name]) == (case.context > 1)
        assert ("tensor_all_reduce counted" in moved[name]) == (case.tensor > 1)
        assert ("pipeline_send counted" in moved[name]) == (case.pipeline > 1)
        gathers = name in ("muon-zero3", "muon-cut", "muon-tensor", "muon-tensor-zero1")
        assert ("muon_matrices counted" in moved[name]) == gathers


def test_weights_that_stay_whole_are_gathered_once(tmp_path: Path, proved: Record) -> None:
    found = counted(REUSE, tmp_path, proved)
    for name, line in found.items():
        inside = ORDER if name.endswith(("20000", "50000")) else 0
        assert line["parameter_all_gather off"] <= inside * line["parameter_all_gather"], (
            name,
            line,
        )
        assert line["gradient_reduce off"] == 0, (name, line)
    least, most = (
        found["none-live-100000"]["parameter_all_gather"],
        found["none-live-0"]["parameter_all_gather"],
    )
    assert least < most < found["full-live-0"]["parameter_all_gather"]


def counted(cases: dict[str, Case], folder: Path, proved: Record) -> dict[str, dict[str, Any]]:
    found = launched(cases, folder, "bytes_worker.py")
    for name, figures in found.items():
        proved("bytes", name, figures)
    return found

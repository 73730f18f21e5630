"""Validation under both pipeline schedules: the plain model's loss over the held-out rows, however
many there are, and a training that goes on as if it had not been interrupted. Many cases in one
launch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.parity.case_launches import launched
from tests.parity.harness import LOSS_ABSOLUTE, Case

pytestmark = pytest.mark.launch

_LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2": {"pipeline": 2},
    "pp2-tp2": {"pipeline": 2, "tensor": 2},
    "pp2-dp2": {"pipeline": 2, "data": 2},
}
CASES: dict[str, Case] = {
    f"{schedule}-{layout}-{loss}-{rows}": dataclasses.replace(
        Case(model="llama-tied", schedule=schedule, accumulation=accumulation, loss=loss), **keys
    )
    for schedule, accumulation in (("dualpipev", 4), ("1f1b", 3))
    for layout, keys in _LAYOUTS.items()
    for loss in ("full", "chunked")
    for rows in ("whole", "packed")
}
_WIDE: dict[str, Case] = {
    "experts": Case(model="mixtral", data=2, expert=2, accumulation=3),
    "experts-zero3": Case(model="mixtral", data=2, expert=2, accumulation=3, zero_stage=3),
    "pipelined-experts": Case(model="mixtral", pipeline=2, data=2, expert=2, accumulation=3),
    "context": Case(model="llama-tied", context=2, accumulation=3, loss="chunked"),
    "pipelined-context": Case(model="llama-tied", pipeline=2, context=2, accumulation=3),
    "context-of-experts": Case(model="mixtral", context=2, data=2, expert=2, accumulation=3),
}
"""A data rank without a held-out row of its own still takes part in its peers' all-to-all."""
CASES |= {f"{name}-{rows}": case for name, case in _WIDE.items() for rows in ("whole", "packed")}
CASES |= {
    "dropout-1f1b-pp2": Case(model="opt-dropout", pipeline=2, accumulation=3),
    "dropout-1f1b-pp2-full": Case(
        model="gpt2-dropout", pipeline=2, accumulation=3, checkpointing="full"
    ),
    "dropout-dualpipev-pp2": Case(
        model="gpt2-dropout", pipeline=2, schedule="dualpipev", accumulation=4
    ),
    "dropout-zero3": Case(model="gpt2-dropout", data=2, zero_stage=3, checkpointing="selective"),
    "dropout-1f1b-pp2-tp2": Case(model="opt-dropout", pipeline=2, tensor=2, accumulation=3),
    "dropout-dualpipev-pp2-tp2-full": Case(
        model="gpt2-dropout",
        pipeline=2,
        tensor=2,
        schedule="dualpipev",
        accumulation=4,
        checkpointing="full",
    ),
}
"""Evaluations drop nothing out, and the steps behind them draw the numbers that they would have
drawn."""
SAMPLE = (
    "dropout-1f1b-pp2",
    "dropout-dualpipev-pp2",
    "dualpipev-pp2-chunked-packed",
    "1f1b-pp2-full-whole",
    "experts-whole",
)
FAILING = "failing"
"""The case of a run whose validations fail and are made again."""


def check(found: dict[str, dict[str, Any]]) -> None:
    for name, figures in found.items():
        assert figures["loss"] <= LOSS_ABSOLUTE, (name, figures)
        assert (figures["tokens"], figures["steps"]) == (0, 0), (name, figures)


def test_fewer_as_many_and_more_than_the_accumulation(tmp_path: Path) -> None:
    cases = {name: CASES[name] for name in SAMPLE} | {FAILING: Case(model="llama", pipeline=2)}
    check(launched(cases, tmp_path, "evaluation_worker.py"))


@pytest.mark.prove
@pytest.mark.parametrize("world", [2, 4])
def test_every_case(
    world: int, tmp_path: Path, proved: Callable[[str, str, dict[str, Any]], None]
) -> None:
    found = launched(
        {n: c for n, c in CASES.items() if c.world == world}, tmp_path, "evaluation_worker.py"
    )
    for name, figures in found.items():
        proved("evaluation", name, figures)
    check(found)

"""`loss: chunked` trains as one plain process that keeps its logits whole, under every kind of layout; many in one
launch."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwright.ir.loss_chunk import chunk_length
from shardwright.runtime.launcher import free_port
from tests.parity.harness import LENGTH, LOSS_ABSOLUTE, NORM_RELATIVE, Case

pytestmark = pytest.mark.launch

_LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2": {"pipeline": 2},
    "tp2": {"tensor": 2},
    "dp2-zero0": {"data": 2, "zero_stage": 0},
    "dp2-zero1": {"data": 2},
    "dp2-zero2": {"data": 2, "zero_stage": 2},
    "dp2-zero3": {"data": 2, "zero_stage": 3},
    "pp2-tp2": {"pipeline": 2, "tensor": 2},
    "pp2-dp2": {"pipeline": 2, "data": 2},
    "tp2-dp2-zero2": {"tensor": 2, "data": 2, "zero_stage": 2},
    "tp2-dp2-zero3": {"tensor": 2, "data": 2, "zero_stage": 3},
    "full-dp4-zero3": {"data": 4, "zero_stage": 3, "checkpointing": "full"},
    "full-pp2-tp2": {"pipeline": 2, "tensor": 2, "checkpointing": "full"},
    "dualpipev-pp2-tp2": {"pipeline": 2, "tensor": 2, "schedule": "dualpipev", "accumulation": 4},
}
# Untied and tied heads, a soft cap on the logits, a divisor, a factor.
_MODELS = ("llama", "gpt2", "llama-tied", "gemma2", "granite", "cohere")
CASES: dict[str, Case] = {
    f"{model} {name}": dataclasses.replace(Case(model=model, loss="chunked"), **layout)
    for name, layout in _LAYOUTS.items()
    for model in _MODELS
}
SAMPLE = (
    "llama pp2-tp2",
    "gpt2 pp2-dp2",
    "gpt2 dualpipev-pp2-tp2",
    "llama-tied tp2-dp2-zero3",
    "gemma2 full-pp2-tp2",
    "granite full-dp4-zero3",
    "cohere tp2-dp2-zero2",
)


def launched(names: list[str], out: Path) -> dict[str, dict[str, Any]]:
    """Case -> its worst figures over the ranks. All of one world size."""
    environment = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": os.pathsep.join(
            [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
        "SHARDWRIGHT_CHUNKED_OUT": str(out),
        "SHARDWRIGHT_CHUNKED_CASES": ",".join(names),
    }
    out.mkdir(parents=True, exist_ok=True)
    program, worker = Path(sys.executable).parent / "deepspeed", Path(__file__).with_name("chunked_worker.py")
    ranks = str(CASES[names[0]].world)
    launch = [str(program), "--hostfile", "none", "--num_gpus", ranks, "--master_port", str(free_port()), str(worker)]
    result = subprocess.run(launch, env=environment, capture_output=True, text=True, timeout=1800)
    found: dict[str, dict[str, Any]] = {}
    for file in sorted(out.glob("rank-*.jsonl")):
        for line in map(json.loads, file.read_text().splitlines()):
            name = line.pop("case")
            assert "error" not in line, f"{name}: {line['error']}"
            before = found.setdefault(name, line)
            before |= {key: max(before[key], value) for key, value in line.items()}
    assert set(found) == set(names), result.stdout[-3000:] + result.stderr[-3000:]
    return found


def check(name: str, figures: dict[str, Any]) -> None:
    assert figures["loss"] <= LOSS_ABSOLUTE, (name, figures)
    assert figures["norm"] <= NORM_RELATIVE, (name, figures)
    # No rank ever held the logits of more than one chunk, and there were several.
    assert figures["positions"] == chunk_length(CASES[name].micro, LENGTH) < LENGTH - 1, (name, figures)


def test_chunks_train_like_whole_logits(tmp_path: Path) -> None:
    for name, figures in launched(list(SAMPLE), tmp_path).items():
        check(name, figures)


@pytest.mark.prove
@pytest.mark.parametrize("world", [2, 4])
def test_every_layout(world: int, tmp_path: Path, proved: Callable[[str, str, dict[str, Any]], None]) -> None:
    for name, figures in launched([n for n, case in CASES.items() if case.world == world], tmp_path).items():
        proved("chunked-parity", name, figures)
        check(name, figures)

"""`loss: chunked` trains as one plain process that keeps its logits whole, under every kind of
layout; many in one launch."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwright.layout.layout import chunk_length
from shardwright.utils.child_processes import free_port
from tests.parity.case_launches import launched
from tests.parity.harness import BF16_RELATIVE, LENGTH, LOSS_ABSOLUTE, NORM_RELATIVE, Case, recipe
from tests.parity.models import LLAMA

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
# In half precision DeepSpeed keeps gradients in another optimizer, which clears them when it likes.
_HALF: dict[str, dict[str, Any]] = {
    "bf16-pp2": {"pipeline": 2},
    "bf16-tp2": {"tensor": 2},
    "bf16-dp2-zero1": {"data": 2},
    "bf16-dp2-zero3": {"data": 2, "zero_stage": 3},
    "bf16-dualpipev-pp2": {"pipeline": 2, "schedule": "dualpipev", "accumulation": 4},
    "bf16-pp2-tp2": {"pipeline": 2, "tensor": 2},
    "bf16-dualpipev-pp2-tp2": {
        "pipeline": 2,
        "tensor": 2,
        "schedule": "dualpipev",
        "accumulation": 4,
    },
}
CASES |= {
    f"{model} {name}": dataclasses.replace(
        Case(model=model, loss="chunked", precision="bf16"), **layout
    )
    for name, layout in _HALF.items()
    for model in ("llama", "gpt2", "llama-tied")
}
SAMPLE = (
    "llama pp2-tp2",
    "gpt2 pp2-dp2",
    "gpt2 dualpipev-pp2-tp2",
    "llama-tied tp2-dp2-zero3",
    "gemma2 full-pp2-tp2",
    "granite full-dp4-zero3",
    "cohere tp2-dp2-zero2",
    "llama bf16-pp2-tp2",
    "gpt2 bf16-dualpipev-pp2-tp2",
)


def check(name: str, figures: dict[str, Any]) -> None:
    half = CASES[name].precision == "bf16"
    assert figures["loss"] <= (BF16_RELATIVE if half else LOSS_ABSOLUTE), (name, figures)
    assert figures["norm"] <= (BF16_RELATIVE if half else NORM_RELATIVE), (name, figures)
    # No rank ever held the logits of more than one chunk, and there were several.
    assert figures["positions"] == chunk_length(CASES[name].micro, LENGTH) < LENGTH - 1, (
        name,
        figures,
    )


def test_chunks_train_like_whole_logits(tmp_path: Path) -> None:
    for name, figures in launched({name: CASES[name] for name in SAMPLE}, tmp_path).items():
        check(name, figures)


@pytest.mark.prove
@pytest.mark.parametrize("world", [2, 4])
def test_every_layout(
    world: int, tmp_path: Path, proved: Callable[[str, str, dict[str, Any]], None]
) -> None:
    cases = {name: case for name, case in CASES.items() if case.world == world}
    for name, figures in launched(cases, tmp_path).items():
        proved("chunked-parity", name, figures)
        check(name, figures)


def peak_rise(loss: str, tmp_path: Path) -> float:
    """Of the resident set in training, in fp32 logits of the micro-batch: 2048 tokens x 32,000
    symbols, 250 MiB."""
    tmp_path.mkdir()
    vocabulary, rows, length = 32_000, 4, 512
    np.save(
        tmp_path / "tokens.npy",
        np.random.default_rng(0).integers(0, vocabulary, (2 * rows, length)),
    )
    case = Case(model="llama", loss=loss, micro=rows, accumulation=1)
    document = recipe(case, tmp_path)
    document["model"]["config"] = {
        **LLAMA,
        "vocab_size": vocabulary,
        "max_position_embeddings": length,
    }
    document["training"] |= {
        "sequence_length": length,
        "steps": 2,
        "scheduler": {"name": "constant"},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(document))
    environment = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "PYTHONPATH": os.pathsep.join(
            [
                str(Path(__file__).resolve().parents[2]),
                *filter(None, [os.environ.get("PYTHONPATH")]),
            ]
        ),
    }
    worker = [sys.executable, str(Path(__file__).with_name("memory_worker.py"))]
    result = subprocess.run(
        [*worker, str(tmp_path / "recipe.yaml"), str(tmp_path / "out")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    rose = int(result.stdout.split("rose ")[1])
    return rose / (rows * length * vocabulary * 4)


@pytest.mark.prove
def test_peak_memory_of_a_real_run(tmp_path: Path) -> None:
    """Whole logits stand in memory several times. The allocator adds up to half of one, more where
    cores are shared."""
    full, chunked = (peak_rise(loss, tmp_path / loss) for loss in ("full", "chunked"))
    assert full - chunked > 0.75, (full, chunked)

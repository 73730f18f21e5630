"""Packed documents train as if each piece went through the plain model alone; counts differ between
micro-batches."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from shardwright.recipe.recipe_types import FLASH_ATTENTION_2
from tests.figures import lines_apart
from tests.parity.harness import (
    LENGTH,
    SEED,
    STEPS,
    Case,
    metrics,
    must,
    recipe,
    shardwright,
    train_in_one_process,
)
from tests.parity.models import MODELS
from tests.parity.reference import initial_model


def write_documents(folder: Path, total: int) -> list[bytes]:
    folder.mkdir(parents=True)
    random, documents = np.random.default_rng(5), list[bytes]()
    while sum(map(len, documents)) < total:
        documents.append(bytes(random.integers(32, 127, random.integers(1, 40)).tolist()))
    for i, document in enumerate(documents):
        (folder / f"{i:05d}.txt").write_bytes(document)
    return documents


def run_with_flash(compiled: Path, stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' own way through flash attention, its kernels' sums by plain PyTorch: a CPU has
    none, and compile refuses the attention there."""
    plan = json.loads((compiled / "plan.json").read_text())
    plan["model"]["attention"] = FLASH_ATTENTION_2
    (compiled / "plan.json").write_text(json.dumps(plan))
    (stand_in / "flash_attn").mkdir(parents=True)
    (stand_in / "flash_attn" / "__init__.py").touch()
    start = (
        "import os\nif 'RANK' in os.environ:\n    from shardwright.models.packed_attention "
        "import emulate_flash_attention\n"
    )
    (stand_in / "sitecustomize.py").write_text(
        start + "    kept = emulate_flash_attention()\n    kept.__enter__()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(stand_in), prepend=os.pathsep)


def pieces_of_step(documents: list[bytes], step: int, batch: int) -> list[dict[str, torch.Tensor]]:
    """The rows of an unshuffled step, cut at document borders: each piece is a row of its own."""
    stream = b"".join(documents)
    borders = set(np.cumsum([len(d) for d in documents]).tolist())
    pieces = []
    for row in range((step - 1) * batch, step * batch):
        cuts = [i for i in range(row * LENGTH + 1, (row + 1) * LENGTH) if i in borders]
        for a, b in zip([row * LENGTH, *cuts], [*cuts, (row + 1) * LENGTH], strict=True):
            if b - a > 1:  # a piece of one token predicts nothing
                ids = torch.tensor([list(stream[a:b])])
                pieces.append({"input_ids": ids, "labels": ids})
    return pieces


PLAIN = Case(model="llama", pipeline=2, data=2, checkpointing="full")
SINGLE = Case(model="gpt2", tensor=2, zero_stage=0)
"""On one stage: the Hugging Face model's own forward."""
WIDE: dict[str, Case] = {
    "llama-s2-tp2-zero3": Case(model="llama", context=2, tensor=2, zero_stage=3),
    "llama-s2-dualpipev": Case(
        model="llama", context=2, pipeline=2, schedule="dualpipev", accumulation=4
    ),
    "mixtral-e2-zero2-chunked": Case(
        model="mixtral", data=2, expert=2, zero_stage=2, loss="chunked"
    ),
    "mixtral-e2-pp2-tp2": Case(model="mixtral", data=2, expert=2, pipeline=2, tensor=2),
    "qwen3-moe-e2-s2-tp2-zero3": Case(
        model="qwen3_moe", context=2, expert=2, tensor=2, zero_stage=3
    ),
    "qwen3-moe-e2-s2-pp2-full": Case(
        model="qwen3_moe", context=2, expert=2, pipeline=2, checkpointing="full"
    ),
}
"""Documents that lie across context ranks, and rows that meet at experts of other ranks."""
OWN_MASKS: dict[str, Case] = {
    "gpt-oss-pp2-tp2": Case(model="gpt_oss", pipeline=2, tensor=2, checkpointing="full"),
    "gpt-oss-dp2-zero2-chunked": Case(model="gpt_oss", data=2, zero_stage=2, loss="chunked"),
    "gpt-oss-s2-pp2": Case(model="gpt_oss", context=2, pipeline=2),
    "opt-tp2": Case(model="opt", tensor=2),
    "opt-pp2-dualpipev": Case(model="opt", pipeline=2, schedule="dualpipev", accumulation=4),
    "bloom-pp2-dp2": Case(model="bloom", pipeline=2, data=2),
}
"""Types whose code hands its masks no positions, or a mask of ones; gpt_oss has windows in every
second layer."""


@pytest.mark.launch
@pytest.mark.parametrize(
    ("case", "flash"),
    [
        (PLAIN, False),
        *(
            pytest.param(case, flash, marks=pytest.mark.prove)
            for case, flash in (
                (Case(model="llama", pipeline=2, tensor=2, checkpointing="selective"), True),
                (Case(model="llama", pipeline=2, context=2, checkpointing="full"), False),
                (
                    Case(
                        model="llama",
                        data=2,
                        zero_stage=2,
                        checkpointing="full",
                        kernels="compile",
                    ),
                    False,
                ),
            )
        ),
        pytest.param(SINGLE, False, marks=pytest.mark.prove),
        pytest.param(SINGLE, True, marks=pytest.mark.prove),
        *(pytest.param(case, False, marks=pytest.mark.prove) for case in WIDE.values()),
        *(pytest.param(case, False, marks=pytest.mark.prove) for case in OWN_MASKS.values()),
    ],
    ids=[
        "llama-pp2-dp2-full",
        "llama-pp2-tp2-flash",
        "llama-pp2-s2-full",
        "llama-dp2-full-compile",
        "gpt2-tp2-zero0",
        "gpt2-tp2-flash",
        *WIDE,
        *OWN_MASKS,
    ],
)
def test_packed_documents_do_not_see_each_other(
    case: Case, flash: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = write_documents(tmp_path / "corpus", (STEPS * case.batch + 2) * LENGTH)
    document = recipe(case, tmp_path)
    document["data"] = {
        "kind": "text",
        "path": "corpus/*.txt",
        "tokenizer": "byte",
        "packing": True,
        "shuffle": False,
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(document))
    must(shardwright("compile", tmp_path / "recipe.yaml", "-o", tmp_path / "out"))
    if flash:
        run_with_flash(tmp_path / "out", tmp_path / "stand-in", monkeypatch)
    must(shardwright("run", tmp_path / "out"))
    wanted = train_in_one_process(
        initial_model(MODELS[case.model], SEED),
        [pieces_of_step(documents, k, case.batch) for k in range(1, STEPS + 1)],
        case.clipping,
    )
    off = lines_apart(metrics(tmp_path / "out"), wanted)
    assert off["loss"] <= 1e-5 and off["norm"] <= 2e-5, off

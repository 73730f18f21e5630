"""Packed documents train as if each piece went through the plain model alone; counts differ between micro-batches."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.parity.harness import (
    BETAS,
    DECAY,
    EPS,
    LENGTH,
    LR,
    MODELS,
    SEED,
    STEPS,
    WARMUP,
    Case,
    metrics,
    must,
    recipe,
    shardwright,
)
from tests.parity.reference import initial_model, train


def write_documents(folder: Path, total: int) -> list[bytes]:
    folder.mkdir(parents=True)
    random, documents = np.random.default_rng(5), []
    while sum(map(len, documents)) < total:
        documents.append(bytes(random.integers(32, 127, random.integers(1, 40)).tolist()))
    for i, document in enumerate(documents):
        (folder / f"{i:05d}.txt").write_bytes(document)
    return documents


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


@pytest.mark.launch
@pytest.mark.parametrize(
    "case",
    [
        Case(model="llama", pipeline=2, data=2, checkpointing="full"),
        pytest.param(Case(model="gpt2", tensor=2, zero_stage=0), marks=pytest.mark.prove),
    ],
    ids=["llama-pp2-dp2-full", "gpt2-tp2-zero0"],
)
def test_packed_documents_do_not_see_each_other(case: Case, tmp_path: Path) -> None:
    documents = write_documents(tmp_path / "corpus", (STEPS * case.batch + 2) * LENGTH)
    document = recipe(case, tmp_path)
    document["data"] = {"kind": "text", "path": "corpus/*.txt", "tokenizer": "byte", "packing": True, "shuffle": False}
    (tmp_path / "recipe.yaml").write_text(json.dumps(document))
    must(shardwright("compile", tmp_path / "recipe.yaml", "-o", tmp_path / "out"))
    must(shardwright("run", tmp_path / "out"))
    wanted = train(
        initial_model(MODELS[case.model], SEED),
        [pieces_of_step(documents, k, case.batch) for k in range(1, STEPS + 1)],
        lr=LR,
        betas=BETAS,
        eps=EPS,
        weight_decay=DECAY,
        warmup=WARMUP,
        clipping=case.clipping,
    )
    for line, loss, norm in zip(metrics(tmp_path / "out"), wanted.losses, wanted.grad_norms, strict=True):
        assert line["loss"] == pytest.approx(loss, abs=1e-5)
        assert line["grad_norm"] == pytest.approx(norm, rel=2e-5)

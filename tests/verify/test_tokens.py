"""The tiny copy's data: documents as the plain model and the runtime see them, and what of a recipe
it takes over."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardwright.data.indexed_dataset import open_megatron
from shardwright.data.sequences import ChunkedSequences
from shardwright.layout.layout import Layout
from shardwright.recipe.recipe_types import DataSection, Recipe, ValidationSection
from shardwright.verify import tiny_copy
from shardwright.verify.tiny_copy import packs_documents, random_tokens
from tests.unit.cost.test_estimate import BASE
from tests.unit.models.factory import recipe_of

ROWS, LENGTH, VOCABULARY = 6, 32, 50


def test_documents_are_what_the_runtime_reads(tmp_path: Path) -> None:
    """Rows cut at the borders of documents, where the runtime's rows have them."""
    tokens = random_tokens(1, ROWS, LENGTH, VOCABULARY, packed=True)
    named = tokens.write(tmp_path / "tokens")
    assert named == {"kind": "megatron", "path": "tokens", "packing": True}
    block = ChunkedSequences(open_megatron(str(tmp_path / "tokens")), LENGTH, True).read(
        np.arange(ROWS)
    )
    assert np.array_equal(block.tokens, tokens.ids) and block.starts is not None
    assert tokens.ends is not None and len(tokens.ends) > ROWS and tokens.ends[-1] == ROWS * LENGTH
    for row in range(ROWS):
        cuts = [0, *(i for i in range(1, LENGTH) if block.starts[row, i]), LENGTH]
        wanted = [tokens.ids[row, a:b].tolist() for a, b in itertools.pairwise(cuts)]
        assert [piece["input_ids"][0].tolist() for piece in tokens.rows(row, row + 1)] == wanted
    every = [piece["input_ids"] for piece in tokens.rows(0, ROWS)]
    assert any(piece.shape[1] == LENGTH for piece in every) or len(every) > ROWS
    assert sum(piece.shape[1] - 1 for piece in every) < ROWS * (LENGTH - 1), (
        "a document's first token is no label"
    )


def test_without_documents_rows_stay_whole(tmp_path: Path) -> None:
    tokens = random_tokens(1, ROWS, LENGTH, VOCABULARY, packed=False)
    assert tokens.write(tmp_path / "tokens") == {
        "kind": "tokens",
        "path": "tokens.npy",
        "packing": False,
    }
    assert np.array_equal(np.load(tmp_path / "tokens.npy"), tokens.ids)
    (block,) = tokens.rows(2, 4)
    assert torch.equal(block["input_ids"], torch.from_numpy(tokens.ids[2:4].astype(np.int64)))
    assert block["labels"] is block["input_ids"]


def with_data(
    kind: str, packing: bool, *, held_out: DataSection | None = None, fraction: float | None = None
) -> Recipe:
    data = DataSection(kind=kind, path="x", tokenizer=None, packing=packing, shuffle=True)
    validated = held_out is not None or fraction is not None
    section = (
        ValidationSection(every_steps=7, fraction=fraction, data=held_out) if validated else None
    )
    return dataclasses.replace(recipe_of(), data=data, validation=section)


@pytest.mark.parametrize(
    ("kind", "packing", "packed"),
    [
        ("text", True, True),
        ("text", False, False),
        ("tokens", True, False),
        ("megatron", True, True),
    ],
)
def test_it_packs_where_the_recipe_does(kind: str, packing: bool, packed: bool) -> None:
    assert packs_documents(with_data(kind, packing)) == packed
    documents = DataSection(kind="text", path="x", tokenizer="byte", packing=True, shuffle=False)
    assert packs_documents(with_data(kind, packing, held_out=documents)), (
        "held-out documents are packed, too"
    )
    mixed = dataclasses.replace(
        with_data(kind, packing).data or documents, kind="mixture", mixture=(documents,)
    )
    assert packs_documents(dataclasses.replace(recipe_of(), data=mixed))


@pytest.mark.parametrize(
    "strategy", [BASE, dataclasses.replace(BASE, loss="chunked", offload="optimizer", zero_stage=2)]
)
@pytest.mark.parametrize("fraction", [None, 0.1])
def test_the_tiny_recipe_asks_for_the_same(
    fraction: float | None, strategy: Layout, tmp_path: Path
) -> None:
    small = tiny_copy.tiny_strategy(strategy)
    named = random_tokens(1, ROWS, LENGTH, VOCABULARY, packed=True).write(tmp_path / "tokens")
    document: Any = tiny_copy.tiny_recipe(
        with_data("text", True, fraction=fraction), small, named, named if fraction else None
    )
    assert (
        document["parallelism"]["offload"] == strategy.offload
        and document["model"]["loss"] == strategy.loss
    )
    assert document["data"] == {**named, "shuffle": False}
    assert document["validation"] == (
        {**named, "every_steps": tiny_copy.EVERY} if fraction else None
    )
    assert tiny_copy.held_out_rows(small) % (small.data * small.micro_batch_size)

"""A rank that holds a parameter in several pieces saves all of them, and another one reads what it
wants of them."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.checkpoint.checkpoint_loader import load_checkpoint
from shardwright.checkpoint.checkpoint_manifest import read_manifest
from shardwright.checkpoint.checkpoint_saver import save_checkpoint
from shardwright.compile.compiled_folder import write_folder
from shardwright.compile.recipe_compiler import compile_recipe
from shardwright.engines.trainer_protocol import OwnedShard, engine_runtime
from shardwright.recipe.recipe_loader import load_recipe
from tests.parity.harness import Case, newest_checkpoint, recipe, write_inputs


class InPieces:
    """A trainer that has each of its fragments in three pieces, the last one first."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    def owned_shards(self) -> Iterator[OwnedShard]:
        for f in self._trainer.owned_shards():
            third = f.live.numel() // 3
            for first, numel in (
                (2 * third, f.live.numel() - 2 * third),
                (0, third),
                (third, third),
            ):
                states = {name: values.narrow(0, first, numel) for name, values in f.states.items()}
                yield dataclasses.replace(
                    f, start=first, states=states, live=f.live.narrow(0, first, numel)
                )


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any, Path]]:
    case = Case(model="llama", zero_stage=0)
    write_inputs(case, tmp_path)
    (tmp_path / "recipe.json").write_text(
        json.dumps({**recipe(case, tmp_path), "target": "reference"})
    )
    made = compile_recipe(load_recipe(tmp_path / "recipe.json"))
    write_folder(tmp_path / "out", made.files)
    monkeypatch.setitem(os.environ, "LOCAL_RANK", "0")
    runtime = engine_runtime(made.plan)
    runtime.open_groups(made.plan)
    yield made.plan, runtime.build_trainer(made.plan, tmp_path / "out"), tmp_path / "out"
    runtime.close_groups()


def test_saved_and_read_in_pieces(trained: tuple[Any, Any, Path]) -> None:
    plan, trainer, folder = trained
    with torch.no_grad():
        for number, f in enumerate(trainer.owned_shards()):
            for place, values in enumerate(f.states.values()):
                if place:  # the master stays the weight
                    values.copy_(torch.arange(values.numel()) + 1000.0 * number + place)
    wanted = {
        f.name: {state: v.clone() for state, v in f.states.items()} for f in trainer.owned_shards()
    }
    save_checkpoint(plan, folder, InPieces(trainer), 3)
    step = newest_checkpoint(folder)
    shards = [s for tensor in read_manifest(step).tensors.values() for s in tensor.shards]
    assert all([f.start for f in s] == sorted(f.start for f in s) and len(s) == 3 for s in shards)
    for reader in (InPieces(trainer), trainer):
        with torch.no_grad():
            for f in trainer.owned_shards():
                for values in f.states.values():
                    values.zero_()
        assert load_checkpoint(plan, reader, step) == 3
        for f in trainer.owned_shards():
            assert all(
                torch.equal(values, wanted[f.name][state]) for state, values in f.states.items()
            ), f.name

"""One recipe under both engines, through the commands: compiled, run by the launcher, resumed across, exported."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest

from shardwright.ir.apart import series_apart
from tests.parity.harness import LOSS_ABSOLUTE, STEPS, Case, compare, metrics, must, recipe, shardwright, write_inputs

pytestmark = [
    pytest.mark.launch,
    pytest.mark.skipif(not importlib.util.find_spec("megatron"), reason="megatron-core is not installed"),
]
CASE = Case(model="llama", tensor=2, pipeline=2, sequence_parallel=True, target="megatron")


def test_trains_exports_and_holds_what_was_planned(tmp_path: Path) -> None:
    """With the proof that a compile makes. The exported weights are the plain process's."""
    compare(CASE, tmp_path)


def compiled(case: Case, folder: Path, steps: int) -> Path:
    """With a checkpoint in the middle."""
    write_inputs(case, folder)
    document = recipe(case, folder)
    document["training"]["steps"] = steps
    document["training"]["scheduler"] = {"name": "constant", "warmup_steps": 0}
    document["checkpoint"] = {"every_steps": STEPS // 2}
    (folder / "recipe.yaml").write_text(json.dumps(document))
    must(shardwright("compile", folder / "recipe.yaml", "-o", folder / "out"))
    return folder / "out"


@pytest.mark.parametrize("first", ["deepspeed", "megatron"])
def test_a_checkpoint_goes_on_under_the_other_engine(first: str, tmp_path: Path) -> None:
    """The losses of the uninterrupted run are those of a run that changes engine and layout in its middle."""
    cases = {
        "deepspeed": Case(model="llama", data=2, zero_stage=2),
        "megatron": dataclasses.replace(CASE, pipeline=1, data=1, accumulation=4),
    }
    (second,) = cases.keys() - {first}
    whole = compiled(cases[first], tmp_path / "first", STEPS)
    must(shardwright("run", whole))
    other = compiled(cases[second], tmp_path / "second", STEPS)
    half = whole / "checkpoints" / f"step-{STEPS // 2:08d}"
    must(shardwright("run", other, "--resume", half))
    wanted = [m["loss"] for m in metrics(whole)][STEPS // 2 :]
    found = [m["loss"] for m in metrics(other)]
    assert len(found) == len(wanted) and series_apart(found, wanted) <= LOSS_ABSOLUTE, (found, wanted)

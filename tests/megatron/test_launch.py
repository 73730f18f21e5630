"""One recipe under both engines, through the commands: compiled, run by the launcher, resumed across, exported."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest

from shardwright.ir.apart import series_apart
from tests.parity.harness import (
    LOSS_ABSOLUTE,
    NORM_RELATIVE,
    STEPS,
    Case,
    compare,
    metrics,
    must,
    recipe,
    shardwright,
    write_inputs,
)

pytestmark = [
    pytest.mark.launch,
    pytest.mark.skipif(not importlib.util.find_spec("megatron"), reason="megatron-core is not installed"),
]
READY = Path(__file__).resolve().parents[2] / "recipes" / "tiny-llama-megatron-cpu.yaml"
SHORT = ("training.steps=5", "training.scheduler.warmup_steps=2")
AS_DEEPSPEED = ("target=deepspeed", "parallelism.virtual_stages=1", "parallelism.sequence_parallel=false")
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


def test_the_ready_recipe_trains_alike_under_both_engines(tmp_path: Path) -> None:
    """Pipeline 2 x 2 virtual stages x tensor 2 with the sequence cut, and DeepSpeed's 1F1B: the same losses."""
    found: dict[str, list[dict[str, float]]] = {}
    for name, changes in {"megatron": (), "deepspeed": AS_DEEPSPEED}.items():
        sets = [word for change in (*SHORT, *changes) for word in ("--set", change)]
        must(shardwright("compile", READY, "-o", tmp_path / name, *sets))
        must(shardwright("run", tmp_path / name))
        found[name] = metrics(tmp_path / name)
    plan = json.loads((tmp_path / "megatron" / "plan.json").read_text())
    assert (plan["target"], len(plan["stages"])) == ("megatron", 4) and plan["strategy"]["sequence_parallel"]
    for key, relative, bound in (("loss", False, LOSS_ABSOLUTE), ("grad_norm", True, NORM_RELATIVE)):
        ours, theirs = ([line[key] for line in found[name]] for name in ("megatron", "deepspeed"))
        assert len(ours) == 5 and series_apart(ours, theirs, relative=relative) <= bound, (key, ours, theirs)

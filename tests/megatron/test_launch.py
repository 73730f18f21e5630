"""One recipe under both engines, through the commands: compiled, run by the launcher, resumed
across, exported."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import get_scheduler

from shardwright.utils.numeric_difference import largest_difference, max_abs_diff, max_series_diff
from tests.megatron.cases import VIRTUAL, case, cut
from tests.parity.harness import (
    LOSS_ABSOLUTE,
    NORM_RELATIVE,
    STEPS,
    WEIGHT_ABSOLUTE,
    Case,
    compare,
    metrics,
    must,
    newest_checkpoint,
    recipe,
    shardwright,
    write_inputs,
)

pytestmark = [
    pytest.mark.launch,
    pytest.mark.skipif(
        not importlib.util.find_spec("megatron"), reason="megatron-core is not installed"
    ),
]
READY = Path(__file__).resolve().parents[2] / "recipes" / "tiny-llama-megatron-cpu.yaml"
SHORT = ("training.steps=5", "training.scheduler.warmup_steps=2")
AS_DEEPSPEED = (
    "target=deepspeed",
    "parallelism.virtual_stages=1",
    "parallelism.sequence_parallel=false",
)
HALF = STEPS - 5
CASE = Case(model="llama", tensor=2, pipeline=2, sequence_parallel=True, target="megatron")
NAN_MEMORY = Path(__file__).resolve().parents[1] / "faults" / "nan_memory"


@pytest.fixture(autouse=True)
def nan_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no run depend on what memory held before it was written."""
    paths = [str(NAN_MEMORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


def test_trains_exports_and_holds_what_was_planned(tmp_path: Path) -> None:
    """With the proof that a compile makes. The exported weights are the plain process's."""
    compare(CASE, tmp_path)


def compiled(case: Case, folder: Path, steps: int, **scheduler: Any) -> Path:
    """With a checkpoint in the middle."""
    write_inputs(case, folder)
    document = recipe(case, folder)
    document["training"]["steps"] = steps
    document["training"]["scheduler"] = scheduler or {"name": "constant", "warmup_steps": 0}
    document["checkpoint"] = {"every_steps": HALF}
    (folder / "recipe.yaml").write_text(json.dumps(document))
    must(shardwright("compile", folder / "recipe.yaml", "-o", folder / "out"))
    return folder / "out"


def deepspeed(model: str = "llama", **keys: Any) -> Case:
    return Case(model=model, **keys)


PAIRS: dict[str, tuple[Case, Case]] = {
    "dp2-zero2-to-pp2-tp2": (
        deepspeed(data=2, zero_stage=2),
        case(pipeline=2, data=1, accumulation=4, **cut()),
    ),
    "tied-pp2-to-cp2": (
        deepspeed("llama-tied", pipeline=2),
        case("llama-tied", context=2, accumulation=2),
    ),
    "gpt2-dp2-zero3-to-vpp2": (
        deepspeed("gpt2-plain-deep", data=2, zero_stage=3),
        case("gpt2-plain-deep", **VIRTUAL, accumulation=4),
    ),
    "deepseek-ep2-to-pp2-ep2": (
        deepspeed("deepseek_v3", data=2, expert=2),
        case("deepseek_v3", pipeline=2, data=2, expert=2),
    ),
}
"""A layout under DeepSpeed and another one under Megatron-Core, of as large a batch."""
ORDERS = [(name, first) for name in PAIRS for first in ("deepspeed", "megatron")]
SAMPLE = [("dp2-zero2-to-pp2-tp2", "deepspeed"), ("dp2-zero2-to-pp2-tp2", "megatron")]
HELD: dict[str, Case] = {
    "on-the-host": case(data=2, accumulation=2, offload="optimizer"),
    "on-the-gpu": case(data=2, accumulation=2),
    "unsharded": case(tensor=2, accumulation=4, zero_stage=0),
    "by-deepspeed": deepspeed(data=2, zero_stage=2, offload="optimizer"),
}
"""Who holds masters and moments, of as large a batch."""
MOVES = [
    *(("on-the-host", other) for other in HELD if other != "on-the-host"),
    *((other, "on-the-host") for other in HELD if other != "on-the-host"),
]


def goes_on(first: Case, second: Case, folder: Path) -> dict[str, float]:
    """How far the losses of a run that changes engine and layout in its middle are from those of
    the uninterrupted run, and the weights that both export."""
    whole = compiled(first, folder / "first", STEPS)
    must(shardwright("run", whole))
    other = compiled(second, folder / "second", STEPS)
    must(shardwright("run", other, "--resume", whole / "checkpoints" / f"step-{HALF:08d}"))
    wanted, found = ([m["loss"] for m in metrics(run)] for run in (whole, other))
    exported = [exported_weights(run, folder / at) for at, run in (("a", whole), ("b", other))]
    assert exported[0].keys() == exported[1].keys()
    weights = largest_difference(
        max_abs_diff(exported[0][key], exported[1][key]) for key in exported[0]
    )
    return {"loss": max_series_diff(found, wanted[HALF:]), "steps": len(found), "weights": weights}


def exported_weights(run: Path, folder: Path) -> dict[str, torch.Tensor]:
    must(shardwright("export", newest_checkpoint(run), "-o", folder))
    return {
        key: value
        for path in folder.glob("*.safetensors")
        for key, value in load_file(path).items()
    }


@pytest.mark.prove
def test_both_engines_train_by_a_schedule_of_transformers(tmp_path: Path) -> None:
    """Each update's rate is that of get_scheduler, also where the other engine goes on in the
    middle: `first_step: 0` is transformers' own count."""
    keys = {"name": "cosine_with_restarts", "warmup_steps": 2, "num_cycles": 2, "first_step": 0}
    whole = compiled(deepspeed(data=2, zero_stage=2), tmp_path / "first", STEPS, **keys)
    must(shardwright("run", whole))
    other = compiled(case(data=2), tmp_path / "second", STEPS, **keys)
    must(shardwright("run", other, "--resume", whole / "checkpoints" / f"step-{HALF:08d}"))
    rate = json.loads((whole / "plan.json").read_text())["optimizer"]["lr"]
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=rate)
    theirs = get_scheduler("cosine_with_restarts", optimizer, 2, STEPS, {"num_cycles": 2})
    wanted = theirs.get_last_lr()
    for _ in range(STEPS - 1):
        optimizer.step()
        theirs.step()
        wanted += theirs.get_last_lr()
    for run, begin in ((whole, 0), (other, HALF)):
        found = [line["learning_rate"] for line in metrics(run)]
        assert found == pytest.approx(wanted[begin:], rel=1e-12, abs=1e-18)
    losses = [[line["loss"] for line in metrics(run)] for run in (whole, other)]
    assert max_series_diff(losses[1], losses[0][HALF:]) <= LOSS_ABSOLUTE


def check_pair(found: dict[str, float]) -> None:
    assert found["steps"] == STEPS - HALF == 5 and found["loss"] <= LOSS_ABSOLUTE, found
    assert found["weights"] <= WEIGHT_ABSOLUTE, found


def ordered(name: str, first: str) -> tuple[Case, Case]:
    one, other = PAIRS[name]
    return (one, other) if one.target == first else (other, one)


@pytest.mark.parametrize(
    ("name", "first"),
    [SAMPLE[0], *(pytest.param(*pair, marks=pytest.mark.prove) for pair in SAMPLE[1:])],
)
def test_a_checkpoint_goes_on_under_the_other_engine(name: str, first: str, tmp_path: Path) -> None:
    check_pair(goes_on(*ordered(name, first), tmp_path))


@pytest.mark.prove
@pytest.mark.parametrize(("first", "second"), [MOVES[0], *MOVES[-2:]])
def test_states_move_to_host_memory_and_back(first: str, second: str, tmp_path: Path) -> None:
    check_pair(goes_on(HELD[first], HELD[second], tmp_path))


@pytest.mark.prove
@pytest.mark.parametrize(("first", "second"), MOVES)
def test_states_move_everywhere(
    first: str, second: str, tmp_path: Path, proved: Callable[..., None]
) -> None:
    found = goes_on(HELD[first], HELD[second], tmp_path)
    check_pair(found)
    proved("megatron-resume", f"{first} to {second}", found)


@pytest.mark.prove
@pytest.mark.parametrize(("name", "first"), ORDERS)
def test_every_pair_goes_on(
    name: str, first: str, tmp_path: Path, proved: Callable[..., None]
) -> None:
    found = goes_on(*ordered(name, first), tmp_path)
    check_pair(found)
    proved("megatron-resume", f"{name}, from {first}", found)


@pytest.mark.prove
def test_the_ready_recipe_trains_alike_under_both_engines(tmp_path: Path) -> None:
    """Pipeline 2 x 2 virtual stages x tensor 2 with the sequence cut, and DeepSpeed's 1F1B: the
    same losses."""
    found: dict[str, list[dict[str, float]]] = {}
    for name, changes in {"megatron": (), "deepspeed": AS_DEEPSPEED}.items():
        sets = [word for change in (*SHORT, *changes) for word in ("--set", change)]
        must(shardwright("compile", READY, "-o", tmp_path / name, *sets))
        must(shardwright("run", tmp_path / name))
        found[name] = metrics(tmp_path / name)
    plan = json.loads((tmp_path / "megatron" / "plan.json").read_text())
    assert (plan["target"], len(plan["stages"])) == ("megatron", 4) and plan["strategy"][
        "sequence_parallel"
    ]
    for key, relative, bound in (
        ("loss", False, LOSS_ABSOLUTE),
        ("grad_norm", True, NORM_RELATIVE),
    ):
        ours, theirs = ([line[key] for line in found[name]] for name in ("megatron", "deepspeed"))
        assert len(ours) == 5 and max_series_diff(ours, theirs, relative=relative) <= bound, (
            key,
            ours,
            theirs,
        )

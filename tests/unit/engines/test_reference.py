"""The reference engine's steps are those of one plain process, in each precision, with adapters and
in chunks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.compile.compiled_folder import write_folder
from shardwright.compile.recipe_compiler import compile_recipe
from shardwright.data.data_preparation import prepare
from shardwright.data.dataset import resolve
from shardwright.engines.trainer_protocol import engine_runtime
from shardwright.parallel.learning_rate import learning_rate
from shardwright.parallel.micro_batches import TrainingBatches
from shardwright.recipe.recipe_loader import load_recipe
from tests.figures import lines_apart
from tests.parity.harness import (
    LOSS_ABSOLUTE,
    NORM_RELATIVE,
    STEPS,
    Case,
    check_half_precision,
    recipe,
    reference,
    write_inputs,
)
from tests.parity.preference import PreferenceCase, plain_run, write_pairs

CASES = {
    "gpt2": Case(model="gpt2", zero_stage=0, checkpointing="selective"),
    "llama-tied-bf16": Case(
        model="llama-tied", zero_stage=0, precision="bf16", checkpointing="full"
    ),
    "llama-partial": Case(model="llama", zero_stage=0, checkpointing={"full": 1}),
    "gpt2-lora": Case(model="gpt2", zero_stage=0, lora_rank=4),
    "llama-chunked": Case(model="llama", zero_stage=0, loss="chunked", clipping=0.0),
}


@pytest.fixture
def compiled(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Case, Any, Any, Path]:
    """The case, its tokens, its plan and the compiled folder."""
    case = CASES[request.param]
    tokens = write_inputs(case, tmp_path)
    document = {**recipe(case, tmp_path), "target": "reference"}
    (tmp_path / "recipe.json").write_text(json.dumps(document))
    found = compile_recipe(load_recipe(tmp_path / "recipe.json"))
    write_folder(tmp_path / "out", found.files)
    return case, tokens, found.plan, tmp_path / "out"


@pytest.fixture
def trainer(compiled: tuple[Case, Any, Any, Path]) -> Iterator[Any]:
    _, _, plan, folder = compiled
    runtime = engine_runtime(plan)
    runtime.open_groups(plan)
    yield runtime.build_trainer(plan, folder)
    runtime.close_groups()


@pytest.mark.parametrize("compiled", CASES, indirect=True)
def test_trains_as_a_plain_process(compiled: tuple[Case, Any, Any, Path], trainer: Any) -> None:
    case, tokens, plan, folder = compiled
    batches = TrainingBatches(*resolve(plan, folder))
    lines = []
    for step in range(1, STEPS + 1):
        rate = learning_rate(plan.optimizer, plan.scheduler, STEPS, step)
        result = trainer.step(batches.micro_batches(step, 0), rate)
        lines.append({"loss": result.loss, "grad_norm": result.grad_norm})
    assert trainer.counters().updates == STEPS
    wanted = reference(case, tokens)
    if case.precision == "bf16":
        check_half_precision(lines, wanted, reference(case, tokens, torch.bfloat16))
        return
    off = lines_apart(lines, wanted)
    assert off["loss"] <= LOSS_ABSOLUTE and off["norm"] <= NORM_RELATIVE, off


def test_trains_a_reward_model_as_a_plain_process(tmp_path: Path) -> None:
    case = PreferenceCase(
        model="llama",
        zero_stage=0,
        target="reference",
        objective={"name": "reward", "center_coefficient": 0.05},
    )
    write_pairs(case, tmp_path)
    found = compile_recipe(load_recipe(tmp_path / "recipe.yaml"))
    write_folder(tmp_path / "out", found.files)
    prepare(found.plan, tmp_path / "out", limit_bytes=None)
    runtime, lines = engine_runtime(found.plan), []
    runtime.open_groups(found.plan)
    trainer = runtime.build_trainer(found.plan, tmp_path / "out")
    batches = TrainingBatches(*resolve(found.plan, tmp_path / "out"))
    wanted = plain_run(case)
    for step in range(1, STEPS + 1):
        rate = learning_rate(found.plan.optimizer, found.plan.scheduler, STEPS, step)
        result = trainer.step(batches.micro_batches(step, 0), rate)
        lines.append({"loss": result.loss, "grad_norm": result.grad_norm})
        assert trainer.objective_metrics() == pytest.approx(wanted.metrics[step - 1], abs=1e-5)
    runtime.close_groups()
    off = lines_apart(lines, wanted.trained)
    assert off["loss"] <= LOSS_ABSOLUTE and off["norm"] <= NORM_RELATIVE, off


@pytest.mark.parametrize("compiled", ["llama-tied-bf16", "gpt2-lora"], indirect=True)
def test_what_a_checkpoint_holds(compiled: tuple[Case, Any, Any, Path], trainer: Any) -> None:
    """Masters and moments of what is trained, views of the live tensors; copied into, they are what
    trains next."""
    fragments = {f.name: f for f in trainer.owned_shards()}
    trained = {
        name for name, f in fragments.items() if set(f.states) == {"fp32", "exp_avg", "exp_avg_sq"}
    }
    adapters = {name for name in fragments if ".lora_" in name}
    assert (
        trained == (adapters or set(fragments))
        and fragments.keys() == trainer.parameter_shards().keys()
    )
    name = min(trained)
    with torch.no_grad():
        fragments[name].states["fp32"].fill_(0.75)
    trainer.finish_restore(3, trainer.counters().__class__(updates=3, loss_scale=None))
    assert trainer.counters().updates == 3
    assert bool((fragments[name].live == 0.75).all())

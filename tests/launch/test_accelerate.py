"""A user's own Trainer script under the plan's accelerate/ files: the engine does what the plan
says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwright.compile.compiled_folder import write_folder
from shardwright.compile.recipe_compiler import CompileResult, compile_recipe
from shardwright.engines.deepspeed.deepspeed_files import (
    ACCELERATE_CONFIG,
    ACCELERATE_DS_CONFIG,
    HF_TRAINER_DS_CONFIG,
)
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.utils.child_processes import free_port, program_path

SCRIPT = Path(__file__).with_name("trainer_script.py")


def compiled(write_recipe: Callable[..., Path], parallelism: dict[str, Any]) -> CompileResult:
    changes = {
        "cluster": {"nodes": 1, "gpus_per_node": 2, "gpu": "cpu"},
        "parallelism": parallelism,
    }
    return compile_recipe(load_recipe(write_recipe(changes)))


@pytest.mark.launch
@pytest.mark.parametrize(
    ("program", "zero_stage"),
    [pytest.param("accelerate", 2, marks=pytest.mark.prove), ("deepspeed", 3)],
)
def test_a_trainer_script_runs_under_the_plan(
    write_recipe: Callable[..., Path], tmp_path: Path, program: str, zero_stage: int
) -> None:
    result = compiled(write_recipe, {"data": 2, "zero_stage": zero_stage, "micro_batch_size": 2})
    write_folder(tmp_path / "out", result.files)
    port = str(free_port())
    if program == "accelerate":
        launcher, deepspeed = (
            ["launch", "--config_file", ACCELERATE_CONFIG, "--main_process_port", port],
            "none",
        )
    else:
        launcher = [
            "--hostfile",
            "none",
            "--num_gpus",
            "2",
            "--master_port",
            port,
            "--no_local_rank",
        ]
        deepspeed = HF_TRAINER_DS_CONFIG
    report, s = tmp_path / "report.json", result.plan.strategy
    script = [SCRIPT, "model", report, s.micro_batch_size, s.gradient_accumulation_steps, deepspeed]
    done = subprocess.run(
        [str(Path(sys.executable).parent / program), *launcher, *map(str, script)],
        cwd=tmp_path / "out",
        env={**os.environ, "PATH": program_path(), "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert report.exists(), done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads(report.read_text())
    assert len(found.pop("losses")) == 3
    assert found == {
        "engine": "DeepSpeedEngine",
        "zero": zero_stage,
        "micro": s.micro_batch_size,
        "accumulation": s.gradient_accumulation_steps,
        "batch": result.plan.training.global_batch_size,
        "bucket": result.plan.zero["reduce_bucket_size"],
        "lr": 2e-3,  # the script's own
        "steps": 3,
    }


@pytest.mark.parametrize("parallelism", [{"tensor": 2}, {"pipeline": 2}])
def test_only_where_there_are_data_ranks_alone(
    write_recipe: Callable[..., Path], parallelism: dict[str, Any]
) -> None:
    files = compiled(write_recipe, parallelism).files
    assert not {ACCELERATE_CONFIG, ACCELERATE_DS_CONFIG, HF_TRAINER_DS_CONFIG} & set(files)


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_lint_finds_nothing_wrong(
    write_recipe: Callable[..., Path], tmp_path: Path, zero_stage: int
) -> None:
    files = compiled(write_recipe, {"data": 2, "zero_stage": zero_stage}).files
    for name, audience in ((HF_TRAINER_DS_CONFIG, "trainer"), (ACCELERATE_DS_CONFIG, "trainer")):
        path = tmp_path / Path(name).name
        path.write_bytes(files[name])
        command = [
            sys.executable,
            "-m",
            "shardwright",
            "lint",
            str(path),
            "--for",
            audience,
            "--world-size",
            "2",
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0 and "error[" not in done.stdout + done.stderr, (
            done.stdout + done.stderr
        )

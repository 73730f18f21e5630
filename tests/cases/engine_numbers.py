"""Compares a plan's numbers with those that DeepSpeed reads from its ds_config.json."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from shardwright.compile.compiled_folder import write_folder
from shardwright.compile.recipe_compiler import CompileResult
from shardwright.plan.plan import Plan

LOADER = Path(__file__).with_name("ds_config_loads.py")


def load(compiled: Sequence[CompileResult], folder: Path) -> list[dict[str, object]]:
    """DeepSpeed's own numbers for each, at the plan's world size. One process, below `folder`."""
    folders = [folder / str(number) for number in range(len(compiled))]
    for place, result in zip(folders, compiled, strict=True):
        write_folder(place, result.files)
    done = subprocess.run(
        [sys.executable, str(LOADER), *map(str, folders)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def numbers(plan: Plan) -> dict[str, object]:
    """The plan's, under the names of `load`."""
    training, s = plan.training, plan.strategy
    dtype = training.gradient_accumulation_dtype
    named = training.precision == "bf16" or (training.precision == "fp16" and dtype != "fp16")
    buckets = {**plan.zero, **plan.extra.get("zero_optimization", {})}  # type: ignore[dict-item]
    return {
        "data": s.zero_world_size,
        "batch": training.global_batch_size * s.context,
        "micro": s.micro_batch_size,
        "accumulation": s.gradient_accumulation_steps,
        "zero": s.zero_stage,
        "clipping": training.gradient_clipping,
        "bf16": training.precision == "bf16",
        "fp16": training.precision == "fp16",
        "optimizer": "adamw",
        "accumulation_dtype": dtype if named else None,
        "bucket": buckets.get("reduce_bucket_size", 500_000_000),
        "offload": s.offload,
        "hpz": s.hpz_partition_size,
        "sharing": s.hpz_partition_size,
    }

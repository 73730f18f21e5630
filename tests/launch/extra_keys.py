"""The keys of `extra`, each with a value that makes DeepSpeed take another way, and the layouts in
which it can matter.

A case trains with the key, saves, and goes on; a plain run of another layout goes on from its
checkpoint.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.parity.harness import Case
from tests.worker_launch import launch_worker

ROOT = Path(__file__).resolve().parents[2]

SAVED, LAST = 4, 7
"""The step of the checkpoint, and the last one."""

LAYOUTS: dict[str, Case] = {
    "zero0": Case(model="llama-tied", data=2, zero_stage=0),
    "zero1": Case(model="llama-tied", data=2),
    "zero2": Case(model="llama-tied", data=2, zero_stage=2),
    "zero3": Case(model="llama-tied", data=2, zero_stage=3),
    "pipeline": Case(model="llama-tied", pipeline=2, micro=4),
    "dualpipev": Case(model="llama-tied", pipeline=2, schedule="dualpipev", accumulation=4),
    "bf16-pipeline": Case(model="llama-tied", pipeline=2, micro=4, precision="bf16"),
    "tensor": Case(model="llama-tied", tensor=2, micro=4),
    "fp16-zero2": Case(model="llama-tied", data=2, zero_stage=2, precision="fp16"),
    "fp16-zero3": Case(model="llama-tied", data=2, zero_stage=3, precision="fp16"),
    "fp16-pipeline": Case(model="llama-tied", pipeline=2, micro=4, precision="fp16"),
}
"""All of two ranks and one global batch."""

RESUMED_ON = {
    "zero0": "zero2",
    "zero1": "pipeline",
    "zero2": "zero3",
    "zero3": "tensor",
    "pipeline": "zero3",
    "dualpipev": "zero3",
    "bf16-pipeline": "zero3",
    "fp16-zero2": "fp16-pipeline",
    "fp16-zero3": "fp16-zero2",
    "fp16-pipeline": "zero3",
}
"""The layout of a case -> the one that goes on from its checkpoint."""

EVERYWHERE = ("zero0", "zero1", "zero2", "zero3", "pipeline", "dualpipev", "bf16-pipeline")
_PARTITIONED = ("zero1", "zero2", "pipeline")
_FP16 = ("fp16-zero2", "fp16-zero3", "fp16-pipeline")

KEYS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "wall_clock_breakdown": (
        True,
        ("zero0", "zero1", "zero2", "zero3"),
    ),  # a pipeline fails: SW3133
    "memory_breakdown": (True, ("zero2", "pipeline")),  # collects garbage at each of its many lines
    "dump_state": (True, EVERYWHERE),
    "steps_per_print": (2, EVERYWHERE),
    "timers": ({"throughput": {"enabled": True, "synchronized": True}}, EVERYWHERE),
    "flops_profiler": (
        {"enabled": True, "profile_step": 2, "output_file": "flops.txt"},
        ("zero0", "zero1", "zero2", "zero3"),
    ),
    "tensorboard": ({"enabled": True, "output_path": "tensorboard", "job_name": "a"}, EVERYWHERE),
    "wandb": ({"enabled": True, "project": "tests"}, ("zero2", "pipeline")),
    "csv_monitor": ({"enabled": True, "output_path": "csv", "job_name": "a"}, EVERYWHERE),
    "aio": ({"block_size": 65536, "queue_depth": 4}, ("zero2", "zero3")),
    "zero_optimization.reduce_bucket_size": (2000, (*_PARTITIONED, "zero3", "bf16-pipeline")),
    "zero_optimization.allgather_bucket_size": (2000, (*_PARTITIONED, "zero3", "bf16-pipeline")),
    "zero_optimization.allgather_partitions": (False, (*_PARTITIONED, "zero3", "bf16-pipeline")),
    "zero_optimization.use_multi_rank_bucket_allreduce": (
        False,
        (*_PARTITIONED, "zero3", "bf16-pipeline"),
    ),
    "zero_optimization.sub_group_size": (3000, ("zero2", "zero3")),
    "zero_optimization.stage3_prefetch_bucket_size": (1000, ("zero3",)),
    "zero_optimization.stage3_max_live_parameters": (1000, ("zero3",)),
    "zero_optimization.stage3_max_reuse_distance": (1000, ("zero3",)),
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": (True, ("zero3",)),
    "zero_optimization.stage3_allgather_sequential": (True, ("zero3",)),
    "zero_optimization.leaf_module": (
        {"classes": ["transformers.models.llama.modeling_llama.LlamaMLP"]},
        ("zero3",),
    ),
    "zero_optimization.log_trace_cache_warnings": (True, ("zero3",)),
    "zero_optimization.enable_sanity_checks": (True, (*_PARTITIONED, "zero3")),
    "fp16.loss_scale": (64, _FP16),
    "fp16.initial_scale_power": (30, _FP16),
    "fp16.loss_scale_window": (2, _FP16),
    "fp16.hysteresis": (1, _FP16),
    "fp16.consecutive_hysteresis": (True, _FP16),
    "fp16.min_loss_scale": (2, _FP16),
    # Last: DeepSpeed keeps it on for every engine that the process makes after it.
    "comms_logger": ({"enabled": True, "verbose": False, "prof_all": True}, EVERYWHERE),
}
"""Key -> (value, layouts)."""


HALF_RELATIVE = 2e-3
"""Losses of another layout, or precision, in half precision. Weights in other places are off by
more."""


def extra(key: str) -> dict[str, Any]:
    section, _, name = key.partition(".")
    value, _ = KEYS[key]
    return {section: {name: value} if name else value}


def cases() -> list[tuple[str, str]]:
    """(key, layout); without a key what each layout does by itself."""
    layouts = dict.fromkeys(layout for _, layouts in KEYS.values() for layout in layouts)
    return [("", layout) for layout in layouts] + [
        (k, layout) for k, (_, where) in KEYS.items() for layout in where
    ]


def tried(out: Path) -> dict[str, dict[str, Any]]:
    """Every case under extra_worker.py: "KEY LAYOUT" -> run, resumed: losses, norms, updates of
    each; of one that ends the ranks its error. The others go on in another launch."""
    found: dict[str, dict[str, Any]] = {}
    while left := [case for case in cases() if name(*case) not in found]:
        output = _launch(out, left)
        figures = out / "figures.json"
        if figures.exists():
            found |= json.loads(figures.read_text())
            figures.unlink()
        if failed := next((case for case in left if name(*case) not in found), None):
            found[name(*failed)] = {"error": output}
    return found


def name(key: str, layout: str) -> str:
    return f"{key or 'plain'} {layout}"


def _launch(out: Path, wanted: list[tuple[str, str]]) -> str:
    """What it printed last."""
    result = launch_worker(
        Path(__file__).with_name("extra_worker.py"),
        2,
        seconds=3600,
        WANDB_MODE="offline",
        SHARDWRIGHT_EXTRA_OUT=str(out),
        SHARDWRIGHT_EXTRA_CASES=json.dumps(wanted),
    )
    return result.stdout[-6000:] + result.stderr[-3000:]

"""Write small traces in the form of torch's profiler, with steps whose seconds are known."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from shardwright.layout.gpu_cluster import resolve_cluster
from shardwright.layout.planning_problem import Problem
from shardwright.recipe.recipe_types import Recipe
from shardwright.trace.kernel_classes import Line
from tests.unit.cli.shipped_models import shipped
from tests.unit.models.factory import recipe_of

KERNELS: dict[Line, str] = {
    "matrix_products": "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT",
    "attention": "void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4> >(Params)",
    "memory_bound": "void at::native::vectorized_elementwise_kernel<8, at::native::Add>(int)",
    "optimizer": "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<Adam>(int)",
    "all_reduce": "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
}
LLAMA = shipped("meta-llama/Llama-3.2-1B")
LAYERS = 16
MS = 1000.0
"""Microseconds, the unit of a trace."""
Event = dict[str, Any]


def event(category: str, name: str, start: float, duration: float, **more: Any) -> Event:
    """start, duration: milliseconds."""
    place = {"pid": 1, "tid": 1} | {key: more.pop(key) for key in ("pid", "tid") if key in more}
    times = {"ts": 5e6 + start * MS, "dur": duration * MS}
    return {"ph": "X", "cat": category, "name": name, **place, **times, "args": more}


def kernel(line: Line, start: float, duration: float, **arguments: Any) -> Event:
    return event("kernel", KERNELS[line], start, duration, tid=7, **arguments)


def nccl(line: Line, start: float, duration: float, elements: int, ranks: Iterable[int]) -> Event:
    """Return a collective in bf16, as an NCCL kernel of torch 2.4 and later tells of it."""
    listed = list(ranks)
    return event(
        "kernel",
        f"ncclDevKernel_{line.title().replace('_', '')}_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        start,
        duration,
        tid=20,
        **{
            "Collective name": line,
            "In msg nelems": elements,
            "Out msg nelems": elements,
            "Group size": len(listed),
            "dtype": "BFloat16",
            "Process Group Name": "0",
            "Process Group Description": "default_pg",
            "Process Group Ranks": json.dumps(listed),
        },
    )


def step_marks(*spans: tuple[float, float]) -> list[Event]:
    return [
        event("user_annotation", f"ProfilerStep#{number}", start, end - start)
        for number, (start, end) in enumerate(spans, start=3)
    ]


def document(events: Iterable[Event], rank: int | None = None, world: int = 2) -> dict[str, Any]:
    distributed = {"backend": "nccl", "rank": rank, "world_size": world}
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}],
        **({} if rank is None else {"distributedInfo": distributed}),
        "traceEvents": list(events),
        "traceName": "trace.json",
    }


def write_trace(path: Path, events: Iterable[Event], **more: Any) -> Path:
    path.write_text(json.dumps(document(events, **more)), encoding="utf-8")
    return path


def write_step(path: Path, seconds: Mapping[Line, float], idle: float = 0.0) -> Path:
    """Write a GPU's step of one kernel a line, one after the other, and an idle end."""
    events, at = [], 0.0
    for line, duration in seconds.items():
        events.append(kernel(line, at, duration * 1e3))
        at += duration * 1e3
    return write_trace(path, [*events, *step_marks((0.0, at + idle * 1e3))])


def recipe_on(gpus: int = 1, gpu: str = "h100-sxm-80gb", **parallelism: Any) -> Recipe:
    """Return a recipe of Llama-3.2-1B at micro-batches of 1 x 4,096."""
    pins = {"tensor": 1, "pipeline": 1, "data": gpus, "zero_stage": 0, "micro_batch_size": 1}
    return recipe_of(
        cluster={"nodes": 1, "gpus_per_node": gpus, "gpu": gpu},
        training={"sequence_length": 4096, "global_batch_size": gpus},
        parallelism={**pins, "activation_checkpointing": "none", **parallelism},
        assume={"ignore_memory": True},
    )


def problem_on(gpus: int = 1, **parallelism: Any) -> Problem:
    recipe = recipe_on(gpus, **parallelism)
    return Problem(recipe=recipe, graph=LLAMA, cluster=resolve_cluster(recipe.cluster))


def with_measured(problem: Problem, measured: Any) -> Problem:
    cluster = dataclasses.replace(problem.recipe.cluster, measured=measured)
    return dataclasses.replace(problem, recipe=dataclasses.replace(problem.recipe, cluster=cluster))

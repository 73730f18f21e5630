"""Published runs with experts, context ranks, low precision and new GPUs (moe.json): the recipe
that asks for each, and scores by regime."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import mean, median
from typing import Any

from shardwright.layout.gpu_cluster import catalogue

Row = dict[str, Any]
LAYOUT_KEYS = ("tp", "pp", "cp", "ep", "virtual_stages", "micro_batch")
LONG_TOKENS = 32768


def low_precision(text: str) -> str:
    """The recipe's name of a row's precision: "FP8-MX" is mxfp8."""
    name = text.lower()
    if "fp4" in name:
        return "nvfp4"
    if "mx" in name:
        return "mxfp8"
    if "block" in name or "sc" in name.split("-")[1:]:
        return "fp8_blockwise"
    return "fp8_tensorwise" if "fp8" in name else "none"


def gpu_of(row: Row) -> str:
    """The catalogue's name of a row's GPU: "H100-SXM-80GB", "GB300"."""
    name = str(row["hardware"]["gpu"]).lower()
    found = [each for each in catalogue()["gpus"] if each == name or each.startswith(f"{name}-")]
    (only,) = found
    return only


def recipe(row: Row) -> dict[str, Any]:
    model, hardware, parallel, how = (
        row[key] for key in ("model", "hardware", "parallel", "price")
    )
    is_megatron, gpus, per_node = (
        how["target"] == "megatron",
        hardware["n_gpus"],
        hardware["gpus_per_node"],
    )
    cluster = {
        "gpu": gpu_of(row),
        "nodes": gpus // per_node,
        "gpus_per_node": per_node,
        "intra_node_gbytes_per_second": hardware["intra_GBps"],
        "inter_node_gbits_per_second": hardware["inter_Gbps_per_gpu"],
    }
    if hardware["nvlink_domain"] > per_node:
        cluster["nvlink_domain_gpus"] = min(hardware["nvlink_domain"], gpus)
    layout = {
        "tensor": parallel["tp"],
        "pipeline": parallel["pp"],
        "data": parallel["dp"],
        "context": parallel["cp"],
        "expert": parallel["ep"],
        "zero_stage": parallel["zero_stage"],
        "micro_batch_size": parallel["micro_batch"],
        "activation_checkpointing": parallel["activation_recompute"],
        "schedule": "1f1b",
        "offload": parallel["offload"] or "none",
        "virtual_stages": parallel["virtual_stages"] if is_megatron else 1,
        "sequence_parallel": bool(parallel["sequence_parallel"]) and is_megatron,
    }
    if parallel["etp"] == 1 and is_megatron and parallel["tp"] > 1:
        layout["expert_tensor"] = 1
    assume: dict[str, Any] = {"kernels": how["kernels"] or "auto", "ignore_memory": True}
    if parallel["ep"] > 1:
        is_real = "real routing" in row["notes"] or "unbalanced" in row["source"]
        assume["expert_imbalance"] = 1.5 if is_real else 1.0
        if is_megatron:
            dispatcher = (row["dispatcher"] or "").lower()
            is_deepep = any(name in dispatcher for name in ("deepep", "hybrid", "flex"))
            layout["expert_dispatcher"] = "deepep" if is_deepep else "alltoall"
            layout["expert_overlap"] = bool(row["ep_overlap"])
    asked = {"config": model["config"]} if model["config"] else {"source": model["hf"]}
    if how["attention"]:
        asked["attention"] = how["attention"]
    return {
        "version": 1,
        "name": "t-" + row["id"][:60].strip("-").lower(),
        "target": how["target"],
        "model": {"weights": "random", **asked},
        "cluster": cluster,
        "training": {
            "sequence_length": model["seq_len"],
            "global_batch_size": parallel["global_batch"],
            "steps": 1000,
            "precision": "fp16" if row["precision"] == "fp16" else "bf16",
            "low_precision": low_precision(row["precision"]),
        },
        "assume": assume,
        "parallelism": layout,
    }


def is_usable(row: Row) -> bool:
    measured = row["measured"]
    has_time = measured["iteration_time_s"] or measured["tokens_per_s_per_gpu"]
    return bool(row["price"]["expressible"] and not measured["oom"] and has_time)


def seconds(row: Row) -> float:
    """Measured seconds of a step."""
    measured, parallel = row["measured"], row["parallel"]
    if measured["iteration_time_s"]:
        return float(measured["iteration_time_s"])
    tokens = parallel["global_batch"] * row["model"]["seq_len"]
    return float(tokens / (measured["tokens_per_s_per_gpu"] * row["hardware"]["n_gpus"]))


def regime(row: Row) -> str:
    parallel, model = row["parallel"], row["model"]
    kind = "dense"
    if parallel["ep"] > 1 or row["family"] == "moe":
        kind = "experts"
    elif parallel["cp"] > 1:
        kind = "context"
    elif model["seq_len"] >= LONG_TOKENS:
        kind = "long"
    precision = "bf16" if low_precision(row["precision"]) == "none" else "low precision"
    return f"{precision} {row['price']['target']} {kind}"


def regrets(rows: Iterable[tuple[Row, float]]) -> list[float]:
    """Of each group of layouts of one job: how much longer the layout that is predicted fastest
    takes than the fastest. rows: with their predicted seconds."""
    groups: dict[str, dict[tuple[str, ...], tuple[float, float]]] = defaultdict(dict)
    for row, predicted in rows:
        if not row["group"]:
            continue
        parallel = row["parallel"]
        tokens = parallel["global_batch"] * row["model"]["seq_len"] / row["hardware"]["n_gpus"]
        key = tuple(
            str(parallel[name]) for name in (*LAYOUT_KEYS, "activation_recompute", "zero_stage")
        )
        group = groups[row["group"] + row["precision"]]
        each = (seconds(row) / tokens, predicted / tokens)
        group[key] = min(group.get(key, each), each)
    several = [list(group.values()) for group in groups.values() if len(group) > 1]
    return [min(group, key=lambda x: x[1])[0] / min(group)[0] - 1 for group in several]


def summary(errors: Mapping[str, list[float]]) -> dict[str, dict[str, float]]:
    """Regime -> its rows, and median, mean and bias of predicted over measured less 1; and all."""
    every = {**errors, "all": [error for found in errors.values() for error in found]}
    return {
        name: {
            "rows": len(found),
            "median": median(map(abs, found)),
            "mean": mean(map(abs, found)),
            "bias": mean(found),
        }
        for name, found in sorted(every.items())
    }

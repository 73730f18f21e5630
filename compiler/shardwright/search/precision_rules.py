"""What a GPU computes in. Of the recipe and the cluster alone, so that `check` can ask, too."""

from __future__ import annotations

from shardwright.cluster.cluster_types import Cluster
from shardwright.diagnostics import Diagnostic, found
from shardwright.recipe.literal_types import Precision


def missing_peak_error(precision: Precision, cluster: Cluster) -> Diagnostic | None:
    if precision in cluster.gpu.peak_flops:
        return None
    return found(
        "SW3118",
        "training.precision",
        f"gpu {cluster.gpu.name} has no {precision} peak",
        (
            "Choose a precision that the GPU computes in, or give its peak in an inline gpu's "
            "peak_tflops."
        ),
        tuple(cluster.gpu.peak_flops),
    )


def fp16_on_cpu_error(precision: Precision, cluster: Cluster) -> Diagnostic | None:
    if precision != "fp16" or not cluster.gpu.is_cpu:
        return None
    return found(
        "SW3119",
        "training.precision",
        "DeepSpeed refuses to run precision fp16 on a CPU",
        "Write bf16 or fp32, or name the GPU that it is for.",
        ("bf16", "fp32"),
    )

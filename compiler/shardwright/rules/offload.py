"""The layout rules about states in host memory."""

from __future__ import annotations

from shardwright.diagnostics import Diagnostic
from shardwright.rules.layout import Subject, found

# In host memory, per parameter of the model: master weights, two moments and the gradient in float32 (arXiv
# 2101.06840), and the parameters themselves in half precision.
OFFLOADED_BYTES = {"optimizer": 16, "parameters": 18}
HOST_SHARE = 0.9  # the rest is the system's, the data loaders' and the file cache's


def ignored(x: Subject) -> Diagnostic | None:
    """Rules 11, 23, 24. The optimizer of a pipeline, and of bf16 with ZeRO-1, is BF16_Optimizer, which ignores offload
    without a word (runtime/bf16_optimizer.py: use_offload=False; DeepSpeed#3866); parameters are only cut, and only
    offloaded, at stage 3."""
    s = x.strategy
    if s.offload == "none":
        return None
    if s.pipeline > 1:
        return found(
            "SW3111",
            "parallelism.offload",
            f"offload {s.offload} with pipeline {s.pipeline}: DeepSpeed's pipeline optimizer ignores it",
            "Use pipeline: 1 with zero_stage 2 or 3, or offload: none.",
            valid=("none",),
        )
    needed = 3 if s.offload == "parameters" else 2
    if s.zero_stage >= needed:
        return None
    return found(
        "SW3111",
        "parallelism.zero_stage",
        f"offload {s.offload} with zero_stage {s.zero_stage}: nothing would be offloaded",
        f"Use zero_stage: {needed}{' or 3' if needed == 2 else ''}, or offload: none.",
        tuple(range(needed, 4)),
    )


def host_memory(x: Subject) -> Diagnostic | None:
    """Rule 35: a node that runs out of memory kills its ranks with signal 9 and no message."""
    if x.strategy.offload == "none":
        return None
    needed = OFFLOADED_BYTES[x.strategy.offload] * x.graph.total_parameters / x.cluster.nodes
    has = x.cluster.host_memory_bytes
    if has is None:
        return found(
            "SW3127",
            "parallelism.offload",
            f"offload {x.strategy.offload} keeps {needed / 2**30:.0f} GiB in each node's memory",
            "Give cluster.host_memory_gib, and the compiler checks that it is there.",
            severity="warning",
        )
    if needed <= HOST_SHARE * has:
        return None
    return found(
        "SW3127",
        "parallelism.offload",
        f"offload {x.strategy.offload} keeps {needed / 2**30:.0f} GiB in each node's memory, which has "
        f"{has / 2**30:.0f} GiB",
        "The system would kill the ranks with signal 9. Use more nodes (each then keeps less), or offload: none.",
    )

"""The layout rules about states in host memory."""

from __future__ import annotations

from shardwright.diagnostics import Diagnostic, found
from shardwright.layout.layout_rule import Candidate
from shardwright.layout.zero_offload_memory import fits_in_host_memory, offloaded_bytes


def offload_fits_host_memory(x: Candidate) -> Diagnostic | None:
    """A node that runs out of memory kills its ranks with signal 9 and no message."""
    if x.strategy.offload == "none":
        return None
    needed = offloaded_bytes(x.strategy.offload, x.graph.total_parameters, x.cluster.nodes)
    has = x.cluster.host_memory_bytes
    if has is None:
        return found(
            "SW3127",
            "parallelism.offload",
            f"offload {x.strategy.offload} keeps {needed / 2**30:.0f} GiB in each node's memory",
            "Give cluster.host_memory_gib, and the compiler checks that it is there.",
            severity="warning",
        )
    if fits_in_host_memory(has, needed):
        return None
    return found(
        "SW3127",
        "parallelism.offload",
        f"offload {x.strategy.offload} keeps {needed / 2**30:.0f} GiB in each node's memory, which "
        f"has {has / 2**30:.0f} GiB",
        (
            "The system would kill the ranks with signal 9. Use more nodes (each then keeps less), "
            "or offload: none."
        ),
    )

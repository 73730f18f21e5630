"""`model.kernels: compile`: torch.compile of each decoder layer's forward pass, below a
recomputation of it.

A layer is one graph (fullgraph) of fixed shapes: every micro-batch has the same. Layers that differ
in nothing but their weights share it. A graph break is an error, not a slow run.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from shardwright.plan.plan import Plan


def compile_layers(model: nn.Module, plan: Plan, layers: Collection[str] | None = None) -> None:
    """layers: only these of the decoder layers, by their paths; None: all. Before
    apply_activation_checkpointing, which keeps the inputs of a whole graph."""
    if plan.model.kernels != "compile":
        return
    decoders = (name for s in plan.stages for name in s.layers if name not in ("embedding", "head"))
    for name in decoders:
        if layers is None or name in layers:
            layer = model.get_submodule(name)
            layer.forward = torch.compile(layer.forward, dynamic=False, fullgraph=True)

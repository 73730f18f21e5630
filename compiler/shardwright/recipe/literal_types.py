"""Defines the closed word lists of a recipe and a layout as types: comparing with any other word
fails mypy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Schedule = Literal["1f1b", "dualpipev"]
Checkpointing = Literal["none", "selective", "full"]
"""Names the activation checkpointing of a layer: what its backward pass recomputes."""
RecomputeModule = Literal[
    "core_attn", "layernorm", "mla_up_proj", "mlp", "moe_act", "shared_experts", "moe"
]
"""Names a module of a layer that Megatron-Core recomputes by itself (its recompute_modules)."""
RecomputedModules = tuple[RecomputeModule, ...]
LayerCheckpointing = Checkpointing | RecomputedModules
"""Names what of a checkpointed layer the backward pass recomputes."""
Offload = Literal["none", "optimizer", "parameters"]
"""Names what is kept in host memory."""
Loss = Literal["full", "chunked"]
ExpertDispatcher = Literal["alltoall", "deepep"]
"""Names what sends tokens to the ranks of their experts (Megatron-Core's token dispatchers)."""
TaskName = Literal["causal-lm", "image-text-to-text", "contrastive", "sequence-classification"]
"""Names the task that a model is trained for."""
Kernels = Literal["hf", "compile"]
"""Names how a decoder layer runs: Hugging Face's modules, one kernel per operator, or torch.compile
of them."""
Precision = Literal["bf16", "fp16", "fp32"]
LowPrecision = Literal["none", "fp8_tensorwise", "fp8_rowwise", "fp8_blockwise", "mxfp8", "nvfp4"]
"""Names the format of linear layers' products, by what shares a scale."""
AutoSwitch = Literal["off", "auto", "on"]
"""Switches a feature; auto turns it on where it is available."""
Objective = Literal["throughput", "memory", "cost"]
FailureCause = Literal["host", "rank", "hang", "preemption", "nonfinite"]
"""Names why an attempt of a run ended early, where a restart may help."""

Fabric = Literal["infiniband", "roce", "efa", "ethernet"]
"""Names the network between nodes."""

SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
CHECKPOINTING: tuple[Checkpointing, ...] = get_args(Checkpointing)
RECOMPUTE_MODULES: RecomputedModules = get_args(RecomputeModule)
OFFLOAD: tuple[Offload, ...] = get_args(Offload)
FAILURE_CAUSES: tuple[FailureCause, ...] = get_args(FailureCause)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialCheckpointing:
    """Checkpoints the first `full` decoder layers of each pipeline stage fully, the others not.

    The first layers go backward last, when the others have freed their activations. A stage with at
    most `full` layers checkpoints all of them.
    """

    full: int

    def __str__(self) -> str:
        """Format as in a recipe."""
        return f"{{full: {self.full}}}"


CONTRASTIVE_MODEL_CLASSES = {"clip": "CLIPModel", "siglip": "SiglipModel"}
"""Maps the model types that are trained on pairs of an image and a caption to their class in
transformers."""

"""The closed words of a recipe and a layout, as types: a comparison with a word that is not one of
them fails mypy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Schedule = Literal["1f1b", "dualpipev"]
Checkpointing = Literal["none", "selective", "full"]
"""Activation checkpointing of a layer: what its backward pass computes again."""
Offload = Literal["none", "optimizer", "parameters"]
"""What is kept in host memory."""
Loss = Literal["full", "chunked"]
TaskName = Literal["causal-lm", "image-text-to-text", "contrastive"]
"""What a model is trained for."""
Kernels = Literal["hf", "compile"]
"""What a decoder layer runs as: Hugging Face's modules, one kernel an operator, or torch.compile of
them."""
Precision = Literal["bf16", "fp16", "fp32"]
AutoSwitch = Literal["off", "auto", "on"]
"""auto: where it can be had."""
Objective = Literal["throughput", "memory", "cost"]

Fabric = Literal["infiniband", "roce", "efa", "ethernet"]
"""The network between nodes."""

SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
CHECKPOINTING: tuple[Checkpointing, ...] = get_args(Checkpointing)
OFFLOAD: tuple[Offload, ...] = get_args(Offload)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialCheckpointing:
    """The first `full` decoder layers of each pipeline stage are checkpointed whole, the others not
    at all. The first ones go backward last: what they make again has the room that the others left.
    A stage with no more layers than that checkpoints all of them."""

    full: int

    def __str__(self) -> str:
        """As a recipe has it."""
        return f"{{full: {self.full}}}"


CONTRASTIVE_MODEL_CLASSES = {"clip": "CLIPModel", "siglip": "SiglipModel"}
"""model_type -> class of transformers, of those that are trained on pairs of a picture and a
caption."""

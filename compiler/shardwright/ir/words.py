"""The closed words of a recipe and a layout, as types: a comparison with a word that is not one of them fails mypy."""

from __future__ import annotations

from typing import Literal, get_args

Schedule = Literal["1f1b", "dualpipev"]
Checkpointing = Literal["none", "selective", "full"]
"""Activation checkpointing: what the backward pass computes again."""
Offload = Literal["none", "optimizer", "parameters"]
"""What is kept in host memory."""
Loss = Literal["full", "chunked"]
Precision = Literal["bf16", "fp16", "fp32"]
Objective = Literal["throughput", "memory", "cost"]

SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
CHECKPOINTING: tuple[Checkpointing, ...] = get_args(Checkpointing)
OFFLOAD: tuple[Offload, ...] = get_args(Offload)

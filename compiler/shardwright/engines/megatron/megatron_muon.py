"""Set up Megatron-Core's Muon for the plan's matrices.

TensorParallelMuon (of megatron-core 0.19.2, its module emerging_optimizers) has the recipe's
momentum, Nesterov's blend, decoupled weight decay and, by these settings, its coefficients and
scale. "duplicated" gathers a matrix over the tensor ranks, which all orthogonalize it. It takes
every weight of two dimensions but the embedding's and the head's, and splits query, key and value.
The marks here split gate and up too, and leave to AdamW what the plan leaves to it.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable
from typing import Any

import torch

from shardwright.diagnostics import refusal
from shardwright.layout.optimizers import OPTIMIZERS
from shardwright.plan.plan import Plan

_GATE_AND_UP = re.compile(r"linear_fc1\.weight\d*$")
_MARKS = ("is_qkv", "qkv_split_shapes", "expert_tp")
"""Attributes of parameters that TensorParallelMuon reads; "qkv" stands for any joined matrices."""


def muon_settings(plan: Plan) -> dict[str, Any]:
    """Return OptimizerConfig's arguments; {} under other optimizers."""
    if not plan.muon:
        return {}
    return {
        "optimizer": "muon",
        "muon_momentum": plan.optimizer.momentum,
        "muon_nesterov": True,
        "muon_num_ns_steps": plan.optimizer.ns_steps,
        "muon_coefficient_type": "simple",
        "muon_scale_mode": "shape_scaling",
        "muon_tp_mode": "duplicated",
        "muon_split_qkv": True,
        # "medium" iterates in bf16 (emerging_optimizers, muon_utils.py, newton_schulz).
        "muon_fp32_matmul_prec": "highest" if plan.training.precision == "fp32" else "medium",
    }


def check_muon(plan: Plan) -> None:
    """Raise SW6018 where this rank's Megatron-Core has no Muon that takes the recipe's settings."""
    if not plan.muon:
        return
    missing = missing_muon()
    if missing:
        raise refusal(
            "SW6018",
            f"this rank cannot run training.optimizer.name muon: {missing}",
            "Install `megatron-core>=0.19` and `emerging-optimizers` (Python 3.12 or newer) on "
            "every host, or write `target: deepspeed`.",
        )


def missing_muon() -> str:
    """Return why Megatron-Core's Muon cannot be used on this host; "" where it can."""
    from importlib import metadata

    if importlib.util.find_spec("megatron.core.optimizer.emerging_optimizers") is None:
        version = metadata.version("megatron-core")
        return f"the only Muon of megatron-core {version} has other coefficients than the recipe"
    from megatron.core.optimizer.emerging_optimizers import HAVE_EMERGING_OPTIMIZERS

    return "" if HAVE_EMERGING_OPTIMIZERS else "emerging-optimizers is not installed"


def mark_matrices(
    plan: Plan, chunks: list[Any], owners: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Mark the parameters, before the optimizer is built, so that it takes the plan's matrices.

    owners: Hugging Face's name and Megatron-Core's parameter, for each that this rank holds
    """
    if not plan.muon:
        return
    for name, parameter in owners:
        if parameter.dim() == 2 and plan.muon_matrices(name) is None:
            setattr(parameter, "is_embedding_or_output_parameter", True)  # noqa: B010
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if _GATE_AND_UP.search(name) and chunk.config.gated_linear_unit:
                half = parameter.shape[0] // 2
                parameter.is_qkv, parameter.qkv_split_shapes = True, [half, half]


def mark_masters(parts: Iterable[Any]) -> None:
    """Copy the marks of half-precision parameters to the masters that the optimizer updates, to
    which Megatron-Core does not copy them."""
    for part in parts:
        for group in getattr(part, "float16_groups", ()):
            for parameter in group:
                for mark in _MARKS:
                    if hasattr(parameter, mark):
                        setattr(parameter.main_param, mark, getattr(parameter, mark))


def is_muon(optimizer: object) -> bool:
    """Return whether an optimizer is Megatron-Core's Muon."""
    return type(optimizer).__name__ == "TensorParallelMuon"


def moment_names(optimizer: object) -> tuple[str, ...]:
    """Return the names of an optimizer's states beside the master."""
    return OPTIMIZERS["muon"].matrix_moments if is_muon(optimizer) else OPTIMIZERS["adamw"].moments


def learning_rate_share(plan: Plan, optimizer: object) -> float:
    """Return an optimizer's learning rate over the recipe's `lr`: under Muon AdamW has another."""
    own = plan.optimizer.adamw_lr
    return 1.0 if own is None or is_muon(optimizer) else own / plan.optimizer.lr

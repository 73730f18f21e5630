"""A rank's parameters and persistent buffers by Hugging Face's names, under adapters and in a
pipeline's pieces."""

from __future__ import annotations

import torch
from torch import nn

from shardwright.parallel.lora_adapters import hf_parameter_name, unique_parameters
from shardwright.plan.plan import Plan


def set_padding(parameter: nn.Parameter) -> None:
    """It is no part of the model: an engine's optimizer wants it."""
    setattr(parameter, "is_padding", True)  # noqa: B010


def is_padding(parameter: nn.Parameter) -> bool:
    return getattr(parameter, "is_padding", False)


def named_parameters(plan: Plan, module: nn.Module) -> dict[str, nn.Parameter]:
    """Of this rank, by one name each: of tied parameters the name that the plan lists, on every
    stage."""
    first = {alias: group[0] for group in plan.model.tied for alias in group}
    named = unique_parameters(
        (name, p) for name, p in module.named_parameters() if not is_padding(p)
    )
    return {first.get(name, name): parameter for name, parameter in named.items()}


def named_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Persistent ones of this rank, by Hugging Face name."""
    run_in_pieces = hasattr(
        module, "stage_id"
    )  # of a pipeline, whose names begin with the piece's number
    found = {}
    for path, owner in module.named_modules():
        for leaf, buffer in owner.named_buffers(recurse=False):
            if leaf not in owner._non_persistent_buffers_set:
                name = f"{path}.{leaf}" if path else leaf
                found[name.split(".", 1)[1] if run_in_pieces else hf_parameter_name(name)] = buffer
    return found

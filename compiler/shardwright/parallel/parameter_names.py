"""Name a rank's parameters and buffers as Hugging Face does, with adapters and in pipeline
stages."""

from __future__ import annotations

import torch
from torch import nn

from shardwright.parallel.lora_adapters import hf_parameter_name, unique_parameters
from shardwright.plan.plan import Plan


def set_padding(parameter: nn.Parameter) -> None:
    """Mark a parameter that an engine's optimizer needs and the model does not have."""
    setattr(parameter, "is_padding", True)  # noqa: B010


def is_padding(parameter: nn.Parameter) -> bool:
    return getattr(parameter, "is_padding", False)


def named_parameters(plan: Plan, module: nn.Module) -> dict[str, nn.Parameter]:
    """Return this rank's parameters by one name each; a tied one has the plan's name on every
    stage."""
    first = {alias: group[0] for group in plan.model.tied for alias in group}
    named = unique_parameters(
        (name, p) for name, p in module.named_parameters() if not is_padding(p)
    )
    return {first.get(name, name): parameter for name, parameter in named.items()}


def named_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return this rank's persistent buffers, by Hugging Face name."""
    run_in_pieces = hasattr(module, "stage_id")  # names in a pipeline begin with the layer's number
    found = {}
    for path, owner in module.named_modules():
        for leaf, buffer in owner.named_buffers(recurse=False):
            if leaf not in owner._non_persistent_buffers_set:
                name = f"{path}.{leaf}" if path else leaf
                found[name.split(".", 1)[1] if run_in_pieces else hf_parameter_name(name)] = buffer
    return found

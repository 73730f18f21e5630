"""Put peft's LoRA adapters at exact paths of a Hugging Face model, and verify that they compute W x
+ alpha / r B A x.

peft is imported only here, and only where a recipe has a `lora` section.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from shardwright.models.model_graph import name_pattern
from shardwright.recipe.recipe_types import LoraSection
from shardwright.utils.numeric_difference import relative_error

ADAPTER = "default"
"""peft's name of the adapter, a part of its parameters' names."""
_MODEL = "model_to_adapt"
"""Name of the model inside the module that peft receives."""
_MOST_SHARE = 1e-4
"""Largest relative error of the logits: the order of the products changes in fp32."""


def linear_paths(model: nn.Module, stack: str, names: tuple[str, ...]) -> list[str]:
    """Return the modules inside the decoder layers with a matrix and one of these names, in the
    model's order."""
    return [
        path
        for path, module in model.named_modules()
        if path.startswith(stack + ".")
        and path.rpartition(".")[2] in names
        and getattr(getattr(module, "weight", None), "ndim", 0) == 2
    ]


def inject_lora(model: nn.Module, lora: LoraSection, paths: list[str]) -> None:
    """Put adapters into exactly the modules at `paths`, and freeze the rest.

    For a model with a `config`, peft would rewrite the targets of mixtures of experts by
    `model_type` (peft.utils.transformers_weight_conversion). So the model is wrapped in a module
    without one.
    """
    from peft import inject_adapter_in_model

    around = nn.Module()
    around.add_module(_MODEL, model)
    inject_adapter_in_model(
        lora_config(lora, target_modules=[f"{_MODEL}.{path}" for path in paths]), around
    )


def lora_config(lora: LoraSection, **more: Any) -> Any:
    """Return peft's configuration of these adapters."""
    from peft import LoraConfig

    return LoraConfig(r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, **more)


def adapter_names(module: str) -> tuple[str, str]:
    """Return the parameter names of A and B."""
    return f"{module}.lora_A.{ADAPTER}.weight", f"{module}.lora_B.{ADAPTER}.weight"


@torch.no_grad()
def lora_blocker(
    model: nn.Module,
    stack: str,
    lora: LoraSection,
    names: tuple[str, ...],
    planned: frozenset[str],
    logits: Callable[[], torch.Tensor],
) -> str:
    """Return why the adapters of these modules would not be trained, or compute something else; ""
    where they are correct.

    The model keeps the adapters.
    planned: patterns of the modules that the plan adapts.
    logits: runs the model.
    """
    paths = linear_paths(model, stack, names)
    if other := sorted(planned ^ {name_pattern(path) for path in paths}):
        return (
            f"{other[0]} is {'not ' if other[0] in planned else ''}a linear of the model, "
            "unlike in its plan"
        )
    try:
        inject_lora(model, lora, paths)
    except ValueError as error:  # a module that only looks like a linear by its parameters
        return f"peft does not adapt these modules ({str(error).splitlines()[0][:200]})"
    parameters = dict(model.named_parameters())
    adapters = {name for path in paths for name in adapter_names(path)}
    if differences := sorted(
        adapters ^ {name for name, p in parameters.items() if p.requires_grad}
    ):
        return f"peft trains other parameters than the adapters of these modules ({differences[0]})"
    for name in sorted(adapters):
        parameters[name].copy_(torch.randn_like(parameters[name]) * 0.05)
    model.eval()
    adapted = logits()
    unused = []
    for name in names:  # the logits stay without the adapters of an unused module
        own = [parameters[adapter_names(p)[1]] for p in paths if p.rpartition(".")[2] == name]
        values = [b.clone() for b in own]
        for b in own:
            b.zero_()
        same = torch.equal(logits(), adapted)
        for b, value in zip(own, values, strict=True):
            b.copy_(value)
        if same:
            unused.append(name)
    if unused:
        return (
            f"its forward never calls {' nor '.join(map(repr, unused))}, whose adapters would "
            "not count"
        )
    for path in paths:
        a, b = (parameters[name] for name in adapter_names(path))
        base = model.get_submodule(f"{path}.base_layer")
        change: torch.Tensor = lora.alpha / lora.rank * (b @ a)
        parameters[f"{path}.base_layer.weight"].add_(
            change.t() if isinstance(base, Conv1D) else change
        )
        b.zero_()
    share = relative_error(adapted, logits())
    if share <= _MOST_SHARE:
        return ""
    return f"its logits are not those of W + alpha / r B A (difference {share:.1e} of the largest)"

"""A Hugging Face module of experts, cut in place to those of this rank; its class and its forward stay as they are.

Which modules those are: those of transformers' own interface of experts, which stacks them along the first
dimension of every parameter, counts them in `num_experts` and takes (hidden states, chosen experts, weights).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import distributed as dist
from torch import nn

from shardwright.modules.expert.dispatch import Experts, dispatched


def number_of_experts(module: Any) -> int:
    """0 where the module is none of experts, or not all of its own parameters are stacks of as many."""
    parameters = list(module.parameters(recurse=False))
    if not hasattr(module, "_is_expert_parallel") or not parameters:
        return 0
    return int(module.num_experts) if all(p.shape[0] == module.num_experts for p in parameters) else 0


def spread_experts(model: nn.Module, paths: Iterable[str], group: dist.ProcessGroup) -> list[nn.Parameter]:
    """The modules' forward and backward passes are collective from here on. Returns their parameters, of this rank's
    experts each. Before any of them has run: a gradient's accumulator keeps the shape that it was made with."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    return [
        parameter
        for path in paths
        for parameter in cut_experts(
            model.get_submodule(path), rank, ranks, lambda own, experts: dispatched(own, experts, group)
        )
    ]


def cut_experts(
    module: nn.Module, rank: int, ranks: int, around: Callable[[Experts, int], Experts]
) -> list[nn.Parameter]:
    """around: makes the module's new forward of its own, which knows this rank's experts, and the number of all."""
    experts = number_of_experts(module)
    if not experts or experts % ranks:
        raise RuntimeError(f"{type(module).__name__}: {experts} experts do not divide over {ranks} ranks")
    local = experts // ranks
    kept = []
    for name, parameter in list(module.named_parameters(recurse=False)):
        part = parameter.detach().narrow(0, rank * local, local)
        part = part if part.stride(0) == 0 else part.clone()  # what has no memory yet stays so
        kept.append(nn.Parameter(part, requires_grad=parameter.requires_grad))
        module._parameters[name] = kept[-1]
    setattr(module, "num_experts", local)  # noqa: B010
    forward = around(module.forward, experts)
    # Types name the arguments as they like, and all have them in the same order.
    module.forward = lambda *args, **named: forward(*args, *named.values())
    return kept

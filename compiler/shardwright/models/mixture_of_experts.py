"""Can a mixture's experts be shared out over ranks? Those of transformers' own interface, which
stacks them along the first dimension of every parameter, counts them in `num_experts` and takes
(hidden states, chosen experts, weights).

Found without ranks: two halves of the experts, each run on the rows that chose them, must add up to
the module.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers.integrations import moe

from shardwright.models.model_skeleton import replace_forward
from shardwright.models.parameter_name_pattern import name_pattern
from shardwright.utils.numeric_difference import max_abs_diff

TOLERANCE = 2e-5
"""Of the largest logit: rows are added up in another order."""

Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(hidden states (T, H), chosen experts (T, k), their weights (T, k)) -> (T, H)"""


_KERNEL_BYTES = 16
"""torch's grouped_mm refuses matrices whose rows do not start at a multiple of it."""
_can_use_grouped_mm = moe._can_use_grouped_mm


def fits_grouped_mm(weight: torch.Tensor) -> bool:
    """Whether torch's kernel takes experts of this shape (E, rows, columns), in the forward and the
    backward pass: each of the two is a row's length in one of them."""
    return all(size * weight.element_size() % _KERNEL_BYTES == 0 for size in weight.shape[-2:])


def _can_use_kernel(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> bool:
    return fits_grouped_mm(weight) and bool(_can_use_grouped_mm(input, weight, offs))


def use_grouped_mm_where_it_fits() -> None:
    """Experts of other sizes, as tensor ranks may leave them, take transformers' own loop over the
    experts."""
    moe._can_use_grouped_mm = _can_use_kernel


def number_of_experts(module: Any) -> int:
    """0 where the module is none of experts, or not all of its own parameters are stacks of as
    many."""
    parameters = list(module.parameters(recurse=False))
    if not hasattr(module, "_is_expert_parallel") or not parameters:
        return 0
    return (
        int(module.num_experts) if all(p.shape[0] == module.num_experts for p in parameters) else 0
    )


def call_positionally(forward: Experts) -> Callable[..., torch.Tensor]:
    """Types name the arguments as they like, and all have them in the same order."""
    return lambda *args, **named: forward(*args, *named.values())


@torch.no_grad()
def expert_parallel_blocker(
    model: nn.Module, input_ids: torch.Tensor, planned: frozenset[str]
) -> str:
    """ "" where they can be. model: tiny, nothing random; input_ids: (B, S). planned: the patterns
    of the modules that are to be shared out."""
    modules = {path: module for path, module in model.named_modules() if number_of_experts(module)}
    if not modules:
        return "it has no module of experts with transformers' interface"
    if {name_pattern(path) for path in modules} != planned:
        return "not all of its stacked parameters are those of experts with transformers' interface"
    if any(
        len(names) > 1 and any(n.rpartition(".")[0] in modules for n in names)
        for names in _names(model)
    ):
        return "layers share experts"
    plain = model(input_ids=input_ids, use_cache=False).logits
    if not plain.isfinite().all():
        return "a tiny copy's logits are not finite"
    with ExitStack() as stack:
        for module in modules.values():
            stack.enter_context(replace_forward(module, call_positionally(_in_halves(module))))
        shared = model(input_ids=input_ids, use_cache=False).logits
    if not max_abs_diff(shared, plain) <= TOLERANCE * max(1.0, float(plain.abs().max())):
        return "experts one by one do not add up to the module that holds them"
    return ""


def _names(model: nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return list(names.values())


def _in_halves(module: Any) -> Experts:
    """As two expert ranks compute it: each on the rows that chose its experts, which it numbers
    from zero."""
    inner, experts = module.forward, int(module.num_experts)
    edges = (0, experts // 2, experts)

    def forward(hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(hidden)
        for first, stop in itertools.pairwise(edges):
            rows, places = ((chosen >= first) & (chosen < stop)).nonzero(as_tuple=True)
            if not len(rows):
                continue
            with _holding(module, first, stop):
                made = inner(
                    hidden[rows], chosen[rows, places, None] - first, weights.new_ones(len(rows), 1)
                )
            out.index_add_(0, rows, (made * weights[rows, places, None]).to(hidden.dtype))
        return out

    return forward


@contextmanager
def _holding(module: Any, first: int, stop: int) -> Iterator[None]:
    """The module with its experts [first, stop) alone."""
    whole, experts = dict(module._parameters), module.num_experts
    held = {name: None if p is None else nn.Parameter(p[first:stop]) for name, p in whole.items()}
    module._parameters.update(held)
    module.num_experts = stop - first
    try:
        yield
    finally:
        module._parameters.update(whole)
        module.num_experts = experts

"""Test whether a mixture's experts can be split over expert ranks, and compute its auxiliary loss.

Experts must have transformers' interface: stacked in the first dimension of every parameter,
counted in `num_experts`, called with (hidden states, chosen experts, weights). Two halves of the
experts, each run on the tokens that chose them, must add up to the module.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations import moe

from shardwright.models.model_graph import name_pattern
from shardwright.models.model_skeleton import parameter_aliases, replace_forward
from shardwright.utils.numeric_difference import max_abs_diff

TOLERANCE = 2e-5
"""Largest relative error of the logits: token outputs are summed in another order."""

Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(hidden states (T, H), chosen experts (T, k), their weights (T, k)) -> (T, H)"""


_KERNEL_BYTES = 16
"""Alignment of a matrix row (bytes) that torch's grouped_mm requires."""
_can_use_grouped_mm = moe._can_use_grouped_mm


def fits_grouped_mm(weight: torch.Tensor) -> bool:
    """Return whether torch's kernel accepts experts of this shape (E, rows, columns) in forward and
    backward."""
    return all(size * weight.element_size() % _KERNEL_BYTES == 0 for size in weight.shape[-2:])


def use_grouped_mm_where_it_fits() -> None:
    """Make experts of other shapes, which tensor parallelism may leave, use transformers' loop over
    experts."""

    def fits(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> bool:
        return fits_grouped_mm(weight) and bool(_can_use_grouped_mm(input, weight, offs))

    moe._can_use_grouped_mm = fits


def number_of_experts(module: Any) -> int:
    """Return the module's number of experts; 0 where not all of its own parameters are stacks of
    them."""
    parameters = list(module.parameters(recurse=False))
    if not hasattr(module, "_is_expert_parallel") or not parameters:
        return 0
    return (
        int(module.num_experts) if all(p.shape[0] == module.num_experts for p in parameters) else 0
    )


def call_positionally(forward: Experts) -> Callable[..., torch.Tensor]:
    """Pass named arguments by position: types name them differently, in the same order."""
    return lambda *args, **named: forward(*args, *named.values())


@torch.no_grad()
def expert_parallel_blocker(
    model: nn.Module, input_ids: torch.Tensor, planned: frozenset[str]
) -> str:
    """Return why the experts cannot be split, "" where they can.

    model: tiny, without dropout. input_ids: (B, S).
    planned: patterns of the modules to split.
    """
    modules = {path: module for path, module in model.named_modules() if number_of_experts(module)}
    if not modules:
        return "it has no module of experts with transformers' interface"
    if {name_pattern(path) for path in modules} != planned:
        return "not all of its stacked parameters are those of experts with transformers' interface"
    if any(
        len(names) > 1 and any(n.rpartition(".")[0] in modules for n in names)
        for names in parameter_aliases(model)
    ):
        return "layers share experts"
    expected = model(input_ids=input_ids, use_cache=False).logits
    if not expected.isfinite().all():
        return "a tiny copy's logits are not finite"
    with ExitStack() as stack:
        for module in modules.values():
            stack.enter_context(replace_forward(module, call_positionally(_in_halves(module))))
        shared = model(input_ids=input_ids, use_cache=False).logits
    if not max_abs_diff(shared, expected) <= TOLERANCE * max(1.0, float(expected.abs().max())):
        return "experts one by one do not add up to the module that holds them"
    return ""


def _in_halves(module: Any) -> Experts:
    """Compute the module as two expert ranks do: each on the tokens that chose its experts,
    numbered from zero."""
    inner, experts = module.forward, int(module.num_experts)
    edges = (0, experts // 2, experts)

    def forward(hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(hidden)
        for first, stop in itertools.pairwise(edges):
            tokens, places = ((chosen >= first) & (chosen < stop)).nonzero(as_tuple=True)
            if not len(tokens):
                continue
            held = {
                name: None if p is None else nn.Parameter(p[first:stop])
                for name, p in module._parameters.items()
            }
            with (
                patch.dict(module._parameters, held),
                patch.object(module, "num_experts", stop - first),
            ):
                made = inner(
                    hidden[tokens],
                    chosen[tokens, places, None] - first,
                    weights.new_ones(len(tokens), 1),
                )
            out.index_add_(0, tokens, (made * weights[tokens, places, None]).to(hidden.dtype))
        return out

    return forward


# DeepSeek-V3's sequence-wise load balance loss (arXiv 2412.19437, equations 17 to 20), for any type
# whose router logits transformers records. For one layer and one sequence, with E experts of which
# each of T tokens chooses k:
# sum over i of f_i P_i, with f_i = E / (k T) x tokens that chose i, and P_i = mean over tokens of
# s_i / sum of s.
# The loss is the mean over layers and sequences, so it adds up over stages, micro-batches and
# ranks; Hugging Face's (a product of sums over a micro-batch) does not. T leaves out padding.
# Documents packed in one sequence count as one sequence, as in DeepSeek-V3's training (section
# 4.1).


AFFINITIES: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda logits: logits.softmax(dim=-1),
    "sigmoid": torch.sigmoid,
}
"""Functions from router logits to a token's affinities to the experts."""
PROPORTIONAL = 1e-3
"""Largest relative spread of a token's ratios of routing weights to affinities."""


def find_routers(model: nn.Module) -> dict[str, nn.Module]:
    """Return, by path, the routers whose first output transformers records as `router_logits`."""
    classes: set[type[nn.Module]] = set()
    for module in model.modules():
        if not isinstance(module, PreTrainedModel):
            continue
        outputs: dict[str, Any] = getattr(module, "_can_record_outputs", None) or {}
        recorders: Any = outputs.get("router_logits")
        for recorder in recorders if isinstance(recorders, list | tuple) else [recorders]:
            if getattr(recorder, "index", None) == 0 and hasattr(recorder, "target_class"):
                classes.add(recorder.target_class)
    kinds = tuple(classes)
    return {
        path: module
        for path, module in model.named_modules()
        if kinds and isinstance(module, kinds)
    }


@dataclass(frozen=True, slots=True)
class NoRouterAuxLoss:
    """Say why a model's routers get no auxiliary loss."""

    why: str


@torch.no_grad()
def detect_affinity(model: nn.Module, input_ids: torch.Tensor) -> str | NoRouterAuxLoss:
    """Return the key of AFFINITIES that every layer's routing weights are proportional to.

    model: tiny. input_ids: (B, S).
    """
    routers = find_routers(model)
    if not routers:
        return NoRouterAuxLoss("transformers records the logits of none of its routers")
    outputs: list[tuple[torch.Tensor, ...]] = []
    hooks = [
        m.register_forward_hook(lambda _m, _a, output: outputs.append(output))
        for m in routers.values()
    ]
    try:
        model(input_ids=input_ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    if len(outputs) != len(routers) or not all(
        _is_routing(output, input_ids.numel()) for output in outputs
    ):
        return NoRouterAuxLoss(
            "its routers do not give logits, weights and chosen experts of every token"
        )
    if any(chosen.shape[-1] == 1 for _, _, chosen in outputs):
        return NoRouterAuxLoss(
            "one expert a token: its routing weights do not tell what they are made of"
        )
    for name, affinities in AFFINITIES.items():
        ratios = [
            weights.float() / affinities(logits.float()).gather(1, chosen)
            for logits, weights, chosen in outputs
        ]
        if all(
            (r.amax(dim=1) - r.amin(dim=1) <= PROPORTIONAL * r.abs().amax(dim=1)).all()
            for r in ratios
        ):
            return name
    return NoRouterAuxLoss(
        f"its routing weights are in proportion to none of {', '.join(AFFINITIES)}"
    )


def _is_routing(output: Any, tokens: int) -> bool:
    if (
        not isinstance(output, tuple)
        or len(output) != 3
        or not all(isinstance(x, torch.Tensor) for x in output)
    ):
        return False
    logits, weights, chosen = output
    return (
        logits.ndim == chosen.ndim == 2
        and len(logits) == len(chosen) == tokens
        and weights.shape == chosen.shape
        and chosen.dtype == torch.int64
        and int(chosen.max()) < logits.shape[1]
    )


class SequenceLengths:
    """Hold the unpadded length of each sequence of the current micro-batch; one instance a process.

    current: (B,) tokens of the unsplit sequences, None where none is padded.
    """

    def __init__(self) -> None:
        self.current: torch.Tensor | None = None

    def recomputing(self) -> AbstractContextManager[None]:
        """Return a context with the current lengths, to enter when this micro-batch is
        recomputed."""
        return self._restored(self.current)

    @contextmanager
    def _restored(self, lengths: torch.Tensor | None) -> Iterator[None]:
        before, self.current = self.current, lengths
        try:
            yield
        finally:
            self.current = before


SEQUENCE_LENGTHS = SequenceLengths()


class RouterAuxLoss:
    """Add the auxiliary loss's gradient to those of a model's routers.

    The loss enters the graph beside the routing weights, so it is part of the backward pass of
    whichever stage and micro-batch a layer runs in. It is in no output.
    share: weight of one micro-batch's sequences in the step's mean, times the factors by which an
        engine divides gradients. Set it before each step.
    """

    def __init__(
        self,
        model: nn.Module,
        coefficient: float,
        affinity: str,
        pieces: int = 1,
        piece: int = 0,
        summed: Callable[[torch.Tensor], torch.Tensor] = lambda counts: counts,
    ) -> None:
        """Register hooks on the routers.

        pieces: ranks that share each sequence; piece: this rank's index among them.
        summed: sums a tensor over these ranks (collective).
        """
        self.coefficient, self.affinity, self.summed = coefficient, affinity, summed
        self.pieces, self.piece = pieces, piece
        self.share, self.length = 1.0, 0
        routers = find_routers(model)
        self.layers = len(routers)
        for router in routers.values():
            router.register_forward_hook(self._add_loss)

    def _add_loss(
        self, router: nn.Module, _: Any, output: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...] | None:
        if not router.training or not torch.is_grad_enabled():
            return None
        logits, weights, chosen = output
        loss, scale = self.of_layer(logits, chosen), self.coefficient * self.share / self.layers
        return logits, _AddLossGradient.apply(weights, loss, scale), chosen  # type: ignore[no-untyped-call]

    def of_layer(self, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Return the mean loss over sequences; of a split sequence this rank's part, which sums up
        over the ranks.

        logits: (B S, E); chosen: (B S, k), where S is `length`, a sequence's tokens on this rank
            with padding.
        """
        if not self.length or len(logits) % self.length:
            raise RuntimeError(f"{len(logits)} tokens are not sequences of {self.length}")
        rows, experts = len(logits) // self.length, logits.shape[1]
        tokens = logits.new_full((rows, 1), self.length * self.pieces, dtype=torch.float32)
        if SEQUENCE_LENGTHS.current is not None:
            tokens = SEQUENCE_LENGTHS.current.to(tokens).view(rows, 1)
        places = torch.arange(self.length, device=logits.device) + self.piece * self.length
        real = (places < tokens).float()  # (B, S): 1 for a token, 0 for padding
        affinities = AFFINITIES[self.affinity](logits.float())
        affinities = (affinities / affinities.sum(dim=-1, keepdim=True)).view(
            rows, self.length, experts
        )
        share = (affinities * real[..., None]).sum(dim=1)
        picked = chosen.reshape(rows, -1)
        counts = share.new_zeros(rows, experts).scatter_add_(
            1, picked, real.repeat_interleave(chosen.shape[1], dim=1)
        )
        f = self.summed(counts) * experts / (chosen.shape[1] * tokens)
        return (f * share / tokens).sum(dim=1).mean()


class _AddLossGradient(torch.autograd.Function):
    """Return the weights unchanged; give the loss a gradient of `scale` in the backward pass."""

    @staticmethod
    def forward(ctx: Any, weights: torch.Tensor, loss: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return gradient, torch.full((), ctx.scale, device=gradient.device), None

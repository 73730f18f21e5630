"""Can a mixture's experts be shared out over ranks? Those of transformers' own interface, which
stacks them along the first dimension of every parameter, counts them in `num_experts` and takes
(hidden states, chosen experts, weights).

Found without ranks: two halves of the experts, each run on the rows that chose them, must add up to
the module.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations import moe

from shardwright.models.model_graph import name_pattern
from shardwright.models.model_skeleton import replace_forward
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


# Load balance of a mixture's routers: DeepSeek-V3's sequence-wise loss (arXiv 2412.19437,
# equations 17 to 20), for any type whose routers transformers can record.
#
# Of one layer and one row, E experts of which each of T tokens chooses k:
#
#     sum over i of f_i P_i,  f_i = E / (k T) x tokens that chose i,  P_i = mean over tokens of s_i
# /
#     sum of s
#
# It is the mean over layers and rows, so that it adds up over stages, micro-batches and ranks,
# which
# Hugging Face's own loss (a product of sums over all layers and rows of a micro-batch) does not. T
# counts a row's tokens before its padding, which is routed but no part of the sequence; documents
# that are packed in one row are one sequence, as in DeepSeek-V3's own training (section 4.1:
# documents are packed without a mask between them).


AFFINITIES: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda logits: logits.softmax(dim=-1),
    "sigmoid": torch.sigmoid,
}
"""What makes a token's affinity to each expert, s, of its router's logits."""
PROPORTIONAL = 1e-3
"""A token's routing weights over its affinities to the experts that it chose: how far apart the
ratios may be."""


def find_routers(model: nn.Module) -> dict[str, nn.Module]:
    """By path, those whose first output transformers records as `router_logits`."""
    recorded = [
        recorder
        for module in model.modules()
        if isinstance(module, PreTrainedModel)
        for recorder in _listed(
            (getattr(module, "_can_record_outputs", None) or {}).get("router_logits")
        )
        if recorder.index == 0
    ]
    kinds = tuple({recorder.target_class for recorder in recorded})
    return {
        path: module
        for path, module in model.named_modules()
        if kinds and isinstance(module, kinds)
    }


def _listed(recorders: Any) -> list[Any]:
    found = recorders if isinstance(recorders, (list, tuple)) else [recorders]
    return [each for each in found if hasattr(each, "target_class") and hasattr(each, "index")]


@dataclass(frozen=True, slots=True)
class NoRouterAuxLoss:
    why: str


@torch.no_grad()
def detect_affinity(model: nn.Module, input_ids: torch.Tensor) -> str | NoRouterAuxLoss:
    """A key of AFFINITIES: the one to which the routing weights of every layer are proportional.
    model: tiny; input_ids: (B, S)."""
    routers = find_routers(model)
    if not routers:
        return NoRouterAuxLoss("transformers records the logits of none of its routers")
    seen: list[tuple[torch.Tensor, ...]] = []
    hooks = [
        m.register_forward_hook(lambda _m, _a, output: seen.append(output))
        for m in routers.values()
    ]
    try:
        model(input_ids=input_ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    if len(seen) != len(routers) or not all(
        _is_routing(output, input_ids.numel()) for output in seen
    ):
        return NoRouterAuxLoss(
            "its routers do not give logits, weights and chosen experts of every token"
        )
    if any(chosen.shape[-1] == 1 for _, _, chosen in seen):
        return NoRouterAuxLoss(
            "one expert a token: its routing weights do not tell what they are made of"
        )
    for name, affinities in AFFINITIES.items():
        if all(
            _proportional(w, affinities(logits.float()).gather(1, chosen))
            for logits, w, chosen in seen
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


def _proportional(weights: torch.Tensor, affinities: torch.Tensor) -> bool:
    ratio = weights.float() / affinities
    return bool(
        (ratio.amax(dim=1) - ratio.amin(dim=1) <= PROPORTIONAL * ratio.abs().amax(dim=1)).all()
    )


class SequenceLengths:
    """Tokens before the padding of each row of the micro-batch that is computed; one a process.

    current: (B,), of the whole rows; None where none is padded.
    """

    def __init__(self) -> None:
        self.current: torch.Tensor | None = None

    def recomputing(self) -> AbstractContextManager[None]:
        """To be made in the forward pass and entered when it is computed again: another micro-batch
        may be current."""
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
    """Adds the loss's gradient to those of a model's routers. Its value is in no output: it enters
    the graph beside the routing weights, and so the backward pass of whichever stage and
    micro-batch a layer runs in.

    share: of one micro-batch's rows in the mean of what is trained on together, with all factors by
    which an engine divides gradients taken back; the coefficient times it is what the gradient is
    scaled with. Set it before each step.
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
        """pieces: ranks that share each row; piece: this rank's number among them; summed: the sum
        of a tensor over them, collective."""
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
        """Mean over rows; of a row that ranks share, this rank's tokens' part, whose sum over the
        ranks is the row's. logits: (B S, E); chosen: (B S, k), S being `length`, a row's tokens on
        this rank, padding included."""
        if not self.length or len(logits) % self.length:
            raise RuntimeError(f"{len(logits)} tokens are no rows of {self.length}")
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
    """The weights as they are; in the backward pass the loss gets a gradient of its own, the
    scale."""

    @staticmethod
    def forward(ctx: Any, weights: torch.Tensor, loss: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return gradient, torch.full((), ctx.scale, device=gradient.device), None

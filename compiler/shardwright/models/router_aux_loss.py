"""Load balance of a mixture's routers: DeepSeek-V3's sequence-wise loss (arXiv 2412.19437,
equations 17 to 20), for any type whose routers transformers can record.

Of one layer and one row, E experts of which each of T tokens chooses k:

    sum over i of f_i P_i,  f_i = E / (k T) x tokens that chose i,  P_i = mean over tokens of s_i /
    sum of s

It is the mean over layers and rows, so that it adds up over stages, micro-batches and ranks, which
Hugging Face's own loss (a product of sums over all layers and rows of a micro-batch) does not. T
counts a row's tokens before its padding, which is routed but no part of the sequence; documents
that are packed in one row are one sequence, as in DeepSeek-V3's own training (section 4.1:
documents are packed without a mask between them).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

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

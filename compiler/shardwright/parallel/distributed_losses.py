"""The loss of DESIGN: the sum over the predicted tokens of the global batch / their number, under
every layout.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwright.layout.layout import chunk_length
from shardwright.models.mixture_of_experts import SEQUENCE_LENGTHS
from shardwright.models.model_skeleton import OutputHead
from shardwright.models.packed_attention import packed_document_masks
from shardwright.models.tasks.causal_lm import IGNORE_INDEX
from shardwright.models.tasks.contrastive import contrastive_loss
from shardwright.parallel.context_parallel import CONTEXT_PARALLEL
from shardwright.parallel.dummy_images import DummyImage, inputs_on_device
from shardwright.parallel.micro_batches import MicroBatch
from shardwright.parallel.tensor_parallel_collectives import vocabulary_parallel_cross_entropy


class CausalLoss:
    """(logits (B, S, V or V/t), labels (B, S)) -> scaled sum of cross-entropies.

    The engine averages over micro-batches and data ranks; `scale` = micro-batches * data ranks /
    predicted tokens of the global batch turns that mean of sums into the loss wanted, for its value
    and its gradient. Set it before each step. shifted: as MicroBatch.shifted of what it is given.
    """

    def __init__(self, tensor_group: dist.ProcessGroup | None = None, first: int = 0) -> None:
        """tensor_group: over whose ranks the vocabulary is cut, this rank's slice from `first`;
        None: it is whole."""
        self.tensor_group = tensor_group
        self.first = first
        self.scale = 1.0
        self.shifted = False

    def __call__(
        self, logits: torch.Tensor, labels: torch.Tensor | tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        return self.total(*self._paired(logits, labels)) * self.scale

    def _paired(
        self, values: torch.Tensor, labels: torch.Tensor | tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Each token's values beside its label."""
        target = labels[0] if isinstance(labels, tuple) else labels
        return (values, target) if self.shifted else (values[:, :-1], target[:, 1:])

    def total(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The sum over tokens whose label stands at their own place."""
        if self.tensor_group is None:
            rows = logits.float().reshape(-1, logits.shape[-1])
            return F.cross_entropy(
                rows, target.reshape(-1), ignore_index=IGNORE_INDEX, reduction="sum"
            )
        return vocabulary_parallel_cross_entropy(
            logits, target, first=self.first, ignored=IGNORE_INDEX, group=self.tensor_group
        ).sum()


class ChunkedLoss(CausalLoss):
    """(hidden states (B, S, H) behind the base model, labels (B, S)) -> the same loss, logits of
    one chunk at a time.

    Each chunk's logits are made again in the backward pass (torch's non-reentrant checkpoint),
    which costs the head's product once more. set `tail` before the first call.
    """

    tail: OutputHead

    def __call__(
        self, hidden: torch.Tensor, labels: torch.Tensor | tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        length = chunk_length(*(labels[0] if isinstance(labels, tuple) else labels).shape)
        # The cuts before the checkpoints: each keeps a view, not a copy.
        pairs = zip(*(x.split(length, dim=1) for x in self._paired(hidden, labels)), strict=True)
        # ZeRO-3 releases the head between forward and recomputation, so its shapes differ then: no
        # metadata check.
        totals = [
            checkpoint(self._chunk, *pair, use_reentrant=False, determinism_check="none")
            for pair in pairs
        ]
        return torch.stack(totals).sum() * self.scale

    def _chunk(self, hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.total(self.tail.logits(hidden), target)


def wrap_chunked_loss(model: nn.Module, loss: ChunkedLoss) -> None:
    """The model's forward takes `labels` too and returns the loss: ZeRO-3 gathers the head inside
    an engine's forward only."""
    tail = loss.tail = OutputHead(model)
    inner = model.forward

    def forward(labels: torch.Tensor, **inputs: Any) -> torch.Tensor:
        return loss(tail.hidden(lambda: inner(**inputs)), labels)

    model.forward = forward


def micro_batch_loss(
    model: nn.Module,
    loss: CausalLoss,
    batch: MicroBatch,
    attention: str,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    blank: DummyImage | None = None,
) -> torch.Tensor:
    """model: the whole one, also inside an engine; attention: what its layers run, which decides
    how packed documents are kept apart; dtype: that they compute in; blank: of a model that sees,
    where ranks must do the same."""
    ids, positions = batch.input_ids.to(device), batch.position_ids
    inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    SEQUENCE_LENGTHS.current = None if batch.lengths is None else batch.lengths.to(device)
    inputs |= CONTEXT_PARALLEL.keywords(
        attention, ids, None if positions is None else positions.to(device)
    )
    inputs |= inputs_on_device(batch.beside, device, dtype) or {}
    labels = batch.labels.to(device)
    with packed_document_masks(model, None if positions is None else inputs["position_ids"]):
        if isinstance(loss, ChunkedLoss):
            return model(labels=labels, **inputs)  # type: ignore[no-any-return]
        if blank is None:
            return loss(model(**inputs).logits, labels)
    with blank.shown(inputs_on_device(batch.blank, device, dtype)) as picture:
        return loss(model(**inputs, **picture).logits, labels)


# The loss of the global batch of pairs, on data ranks that each hold a share of it: features are
# gathered with their gradient, so that it is the loss that one process computes over all rows.
# Letters as in models/tasks/contrastive.py.


class AllGatherFeatures(torch.autograd.Function):
    """(b, P) -> (N, P), the rows of all ranks of a group in their order. What every rank's loss
    says of this rank's rows is summed on the way back."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group, ctx.rows = group, len(rows)
        found = [torch.empty_like(rows) for _ in range(dist.get_world_size(group))]
        dist.all_gather(found, rows.contiguous(), group=group)
        return torch.cat(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        whole = gradients[0].contiguous()
        dist.all_reduce(whole, group=ctx.group)  # gloo has no reduce-scatter of its own
        return whole.narrow(0, dist.get_rank(ctx.group) * ctx.rows, ctx.rows), None


def wrap_contrastive_loss(model: nn.Module, kind: str, group: dist.ProcessGroup) -> None:
    """The model's forward returns this rank's share of the loss: ZeRO-3 gathers the scale, a
    parameter of the outermost module, inside an engine's forward only. The mean over the group is
    the global batch's loss, and so is the mean of gradients, which engines take. kind: as of
    contrastive_loss."""
    whole, inner = model, model.forward

    def forward(**inputs: torch.Tensor) -> torch.Tensor:
        output = inner(**inputs)
        own = output.text_embeds.float(), output.image_embeds.float()
        every = own
        if dist.get_world_size(group) > 1:
            # Both in one collective: each rank has as many of one as of the other.
            width = own[0].shape[1]
            gathered = AllGatherFeatures.apply(torch.cat(own, dim=1), group)  # type: ignore[no-untyped-call]
            every = gathered[:, :width], gathered[:, width:]
        first = dist.get_rank(group) * len(own[0])
        scale, bias = whole.logit_scale, getattr(whole, "logit_bias", None)
        return contrastive_loss(kind, own, every, scale, bias, first)  # type: ignore[arg-type]

    model.forward = forward

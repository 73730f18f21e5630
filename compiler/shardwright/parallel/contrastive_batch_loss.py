"""The loss of the global batch of pairs, on data ranks that each hold a share of it: features are
gathered with their gradient, so that it is the loss that one process computes over all rows.
Letters as in models/tasks/contrastive.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from shardwright.models.tasks.contrastive import contrastive_loss


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

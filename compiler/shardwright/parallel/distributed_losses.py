"""Compute the global loss in every layout: summed over the batch's predicted tokens, over their
number."""

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
from shardwright.parallel.distillation_loss import DistillationLoss, top_k_divergence
from shardwright.parallel.dummy_images import DummyImage, inputs_on_device
from shardwright.parallel.micro_batches import MicroBatch
from shardwright.parallel.preference_loss import PreferenceLoss
from shardwright.parallel.tensor_parallel_collectives import (
    top_log_probabilities,
    vocabulary_parallel_cross_entropy,
)
from shardwright.plan.plan import Plan
from shardwright.recipe.objectives import ObjectiveSection


class CausalLoss:
    """Return the scaled sum of cross-entropies of (logits (B, S, V or V/t), labels (B, S)), or
    what `objective` makes of them.

    The engine averages over micro-batches and data ranks. `scale` = micro-batches * data ranks /
    predicted tokens of the global batch corrects that mean, for the value and the gradient. Set it
    before each step.

    shifted: as MicroBatch.shifted of the batch
    objective: None for the next-token objective
    scores: collects the log-probabilities of a micro-batch's labels (B, S), as they are aligned
        here, instead of a loss; None trains
    top: with scores, K > 0 collects (B, S, 2 + 2 K) instead: log-probability, normalizer, and ids
        and log-probabilities of the K largest logits
    """

    objective: PreferenceLoss | DistillationLoss | None = None
    scores: list[torch.Tensor] | None = None
    top: int = 0

    def __init__(self, tensor_group: dist.ProcessGroup | None = None, first: int = 0) -> None:
        """Take the group over whose ranks the vocabulary is sharded, this rank's slice from
        `first`.

        tensor_group: None for an unsharded vocabulary
        """
        self.tensor_group = tensor_group
        self.first = first
        self.scale = 1.0
        self.shifted = False

    def __call__(
        self, logits: torch.Tensor, labels: torch.Tensor | tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        return self._reduced([self.losses(*self._paired(logits, labels))], labels)

    def _reduced(
        self, losses: list[torch.Tensor], labels: torch.Tensor | tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        """Reduce what `losses` returned for the chunks of a micro-batch. labels: with what
        else the objective reads (MicroBatch.labels_and_scores)."""
        if self.scores is not None:
            self.scores.append(torch.cat(losses, dim=1).detach())
            return losses[0].new_zeros(())
        if isinstance(self.objective, PreferenceLoss):
            assert isinstance(labels, tuple), "they have the labels of each completion beside them"
            return self._preference_loss(self.objective, -torch.cat(losses, dim=1), labels)
        totals = torch.stack(losses).sum(dim=0)
        if isinstance(self.objective, DistillationLoss):
            return self.objective(totals, self.scale)
        return totals * self.scale

    def _preference_loss(
        self, objective: PreferenceLoss, scores: torch.Tensor, labels: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        """Return the objective's loss of scores (B, S) that are aligned as `_paired` aligns
        labels."""
        _, tokens, *beside = labels
        completions = None
        if objective.objective.packed:
            completions, *beside = beside
            _, completions = self._paired(completions, completions)
        return objective(scores, tokens, completions, beside, self.scale)

    def _paired(
        self, values: torch.Tensor, labels: torch.Tensor | tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        """Align each token's values with its label, and with what its teacher says of it."""
        target, *beside = labels if isinstance(labels, tuple) else (labels,)
        teacher = beside if isinstance(self.objective, DistillationLoss) else ()
        if self.shifted:
            return values, target, *teacher
        return values[:, :-1], target[:, 1:], *(each[:, 1:] for each in teacher)

    def losses(
        self, logits: torch.Tensor, target: torch.Tensor, *teacher: torch.Tensor
    ) -> torch.Tensor:
        """Return the cross-entropy of labels that are aligned with the logits: its sum, or each
        label's (B, S) for a preference. With a teacher, return the sums (3,) that DistillationLoss
        takes; for scores, each label's log-probability (B, S)."""
        if self.scores is None and isinstance(self.objective, DistillationLoss):
            found = top_k_divergence(
                logits, target, *teacher, first=self.first, group=self.tensor_group
            )
            return torch.stack([*(x.sum() for x in found), (target != IGNORE_INDEX).sum()])
        is_whole = self.objective is None and self.scores is None
        if self.tensor_group is None:
            rows = logits.float().reshape(-1, logits.shape[-1])
            losses = F.cross_entropy(
                rows,
                target.reshape(-1),
                ignore_index=IGNORE_INDEX,
                reduction="sum" if is_whole else "none",
            )
        else:
            losses = vocabulary_parallel_cross_entropy(
                logits, target, first=self.first, ignored=IGNORE_INDEX, group=self.tensor_group
            )
        if is_whole:
            return losses.sum()
        each = losses.reshape(target.shape)
        if self.scores is None:
            return each
        if not self.top:
            return -each
        largest = top_log_probabilities(logits, self.top, first=self.first, group=self.tensor_group)
        return torch.cat([-each.unsqueeze(-1), largest], dim=-1)


def objective_loss(
    objective: ObjectiveSection,
    device: torch.device,
    context_group: dist.ProcessGroup | None = None,
) -> PreferenceLoss | DistillationLoss | None:
    """Return what CausalLoss.objective is for a recipe's objective.

    context_group: of the ranks that share each sequence; None for whole ones
    """
    if objective.traits.reads_preferences:
        return PreferenceLoss(objective, device, context_group)
    return DistillationLoss(objective, device) if objective.traits.reads_teacher else None


class RewardLoss(CausalLoss):
    """Compute the loss of a reward model from the scores of all tokens (B, S, 1) and labels (B, S),
    of which each row has one: the token whose score is read. `objective` has the formula."""

    def __call__(
        self, scores: torch.Tensor, labels: torch.Tensor | tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        assert isinstance(self.objective, PreferenceLoss) and isinstance(labels, tuple)
        own = scores[..., 0].masked_fill(labels[0] == IGNORE_INDEX, 0.0)
        return self._preference_loss(self.objective, own, labels)

    def _paired(
        self, values: torch.Tensor, labels: torch.Tensor | tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        """Leave labels where they are: a token's score is its own."""
        return values, labels[0] if isinstance(labels, tuple) else labels


class ChunkedLoss(CausalLoss):
    """Compute the same loss from hidden states (B, S, H), with one chunk of logits in memory at a
    time.

    The backward pass recomputes each chunk's logits (torch's non-reentrant checkpoint), which
    repeats the head's product. Set `tail` before the first call.
    """

    tail: OutputHead

    def __call__(
        self, hidden: torch.Tensor, labels: torch.Tensor | tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        length = chunk_length(*(labels[0] if isinstance(labels, tuple) else labels).shape)
        # Split before the checkpoints: each then saves a view, not a copy.
        pairs = zip(*(x.split(length, dim=1) for x in self._paired(hidden, labels)), strict=True)

        def chunk_losses(hidden: torch.Tensor, *target: torch.Tensor) -> torch.Tensor:
            return self.losses(self.tail.logits(hidden), *target)

        # ZeRO-3 releases the head between forward and recomputation, so metadata checks would fail.
        found = [
            checkpoint(chunk_losses, *pair, use_reentrant=False, determinism_check="none")
            for pair in pairs
        ]
        return self._reduced(found, labels)


def causal_loss_class(plan: Plan) -> type[CausalLoss]:
    """Return the class of the loss that takes the outputs of a plan's model."""
    if plan.training.objective.traits.scores_sequences:
        return RewardLoss
    return ChunkedLoss if plan.model.loss == "chunked" else CausalLoss


def wrap_chunked_loss(model: nn.Module, loss: ChunkedLoss) -> None:
    """Make the model's forward take `labels` and return the loss.

    ZeRO-3 gathers the head only inside an engine's forward.
    """
    tail = loss.tail = OutputHead(model)
    inner = model.forward

    def forward(labels: torch.Tensor | tuple[torch.Tensor, ...], **inputs: Any) -> torch.Tensor:
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
    """Return the loss of a micro-batch.

    model: the unsplit model, possibly inside an engine
    attention: the layers' attention, which decides how packed documents are separated
    dtype: compute dtype
    blank: the dummy image of a vision-language model, where ranks must run the same collectives
    """
    ids, positions = batch.input_ids.to(device), batch.position_ids
    inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    SEQUENCE_LENGTHS.current = None if batch.lengths is None else batch.lengths.to(device)
    inputs |= CONTEXT_PARALLEL.keywords(
        attention, ids, None if positions is None else positions.to(device)
    )
    inputs |= inputs_on_device(batch.beside, device, dtype) or {}
    labels = batch.labels_and_scores(device)
    with packed_document_masks(model, None if positions is None else inputs["position_ids"]):
        if isinstance(loss, ChunkedLoss):
            return model(labels=labels, **inputs)  # type: ignore[no-any-return]
        if blank is None:
            return loss(model(**inputs).logits, labels)
    with blank.shown(inputs_on_device(batch.blank, device, dtype)) as picture:
        return loss(model(**inputs, **picture).logits, labels)


# The contrastive loss of the global batch. Data ranks gather features with their gradients, so it
# equals one process's loss over all pairs. Letters as in models/tasks/contrastive.py.


class AllGatherFeatures(torch.autograd.Function):
    """Gather (b, P) features of all ranks to (N, P), in rank order; sum their gradients
    backward."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group, ctx.rows = group, len(rows)
        found = [torch.empty_like(rows) for _ in range(dist.get_world_size(group))]
        dist.all_gather(found, rows.contiguous(), group=group)
        return torch.cat(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        whole = gradients[0].contiguous()
        dist.all_reduce(whole, group=ctx.group)  # gloo has no reduce-scatter
        return whole.narrow(0, dist.get_rank(ctx.group) * ctx.rows, ctx.rows), None


def wrap_contrastive_loss(model: nn.Module, kind: str, group: dist.ProcessGroup) -> None:
    """Make the model's forward return this rank's share of the loss.

    ZeRO-3 gathers the scale, a parameter of the outermost module, only inside an engine's forward.
    The mean over the group is the global loss; engines average gradients likewise.

    kind: as contrastive_loss takes it
    """
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

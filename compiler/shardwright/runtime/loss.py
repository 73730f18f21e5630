"""The loss of DESIGN: the sum over the predicted tokens of the global batch / their number, under every layout."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from deepspeed import comm as dist
from deepspeed.sequence.cross_entropy import vocab_parallel_cross_entropy

from shardwright.runtime.batches import IGNORED


class CausalLoss:
    """(logits (B, S, V or V/t), labels (B, S)) -> scaled sum of cross-entropies.

    DeepSpeed averages over micro-batches and data ranks; `scale` = micro-batches * data ranks / predicted tokens of the
    global batch turns that mean of sums into the loss wanted, for its value and its gradient. Set it before each step.
    """

    def __init__(self, vocabulary: int, tensor_group: dist.ProcessGroup | None, held: tuple[int, int] | None) -> None:
        """held: [first, last) of the vocabulary whose logits this tensor rank holds; None where it holds all."""
        self.vocabulary = vocabulary
        self.tensor_group = tensor_group
        self.held = held
        self.scale = 1.0

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
        target = labels[0] if isinstance(labels, tuple) else labels
        logits, target = logits[:, :-1].float(), target[:, 1:]
        if self.held is None:
            total = F.cross_entropy(
                logits.reshape(-1, logits.shape[-1]), target.reshape(-1), ignore_index=IGNORED, reduction="sum"
            )
        else:
            first, last = self.held
            total = vocab_parallel_cross_entropy(
                logits,
                target,
                tp_group=self.tensor_group,
                vocab_start_index=first,
                vocab_end_index=last,
                global_vocab_size=self.vocabulary,
                ignore_index=IGNORED,
                reduction="none",
            ).sum()
        return total * self.scale

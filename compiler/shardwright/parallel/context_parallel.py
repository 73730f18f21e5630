"""Run transformers' models on one shard of each sequence while the process's switch is on.

Masks are built for whole sequences, so windows, chunks and packed documents are as without context
ranks. transformers builds them in one function, which counts its input tokens. Rotary embeddings
that depend on the length also use whole sequences (models/context_parallel_probe.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch import nn
from transformers import masking_utils
from transformers.modeling_utils import AttentionInterface

from shardwright.models.context_parallel_probe import full_sequence_rope
from shardwright.models.packed_attention import packed_attention_arguments
from shardwright.models.tasks.causal_lm import IGNORE_INDEX
from shardwright.parallel.micro_batches import MicroBatch

# Each context rank holds a shard of every sequence. Around attention, all-to-alls exchange tokens
# for heads (arXiv 2309.14509); the rest of a model works on each token alone. B: micro-batch, S: a
# whole sequence, s: context ranks, H and K: query and key heads of this rank without context
# parallelism, D: head size.


class _HeadsAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, split: int, join: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.back = join, split, group
        return _transpose_over_ranks(x, split, join, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _transpose_over_ranks(gradient, *ctx.back), None, None, None


def _transpose_over_ranks(
    x: torch.Tensor, split: int, join: int, group: dist.ProcessGroup
) -> torch.Tensor:
    sent = torch.stack(x.chunk(dist.get_world_size(group), dim=split))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(), dim=join)


def heads_all_to_all(
    x: torch.Tensor, *, split: int, join: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """Split dimension `split` over the group's ranks and concatenate their parts along `join`.

    The split dimension must divide by the ranks; parts are in rank order. The gradient takes the
    reverse way.
    """
    exchange: Callable[..., torch.Tensor] = _HeadsAllToAll.apply
    return exchange(x, split, join, group)


# A model's own attention function, on all tokens of a sequence and a share of its heads.


Attention = Callable[..., tuple[torch.Tensor, Any]]
"""Matches transformers' attention interface: (module, query (B, H, S, D), key, value (B, K, S,
D), mask, ...) -> (output (B, S, H, D), weights or None)."""


class _LocalHeadsView:
    """Show an attention function its module with other values of what depends on the number of
    heads."""

    def __init__(self, module: nn.Module, values: dict[str, Any]) -> None:
        self._module = module
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def ulysses_attention(
    inner: Attention,
    group: dist.ProcessGroup,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Run `inner` with S/s tokens of each rank.

    attention_mask: of the whole sequence

    Raises ValueError where the heads do not divide over the ranks.
    """
    ranks, heads = dist.get_world_size(group), query.shape[1]
    if heads % ranks:
        raise ValueError(f"{heads} attention heads do not divide over {ranks} context ranks")
    first, own = dist.get_rank(group) * heads // ranks, heads // ranks

    def of_own_heads(x: Any, dimension: int) -> Any:
        """Slice a tensor with a value for each head."""
        if (
            not isinstance(x, torch.Tensor)
            or x.ndim <= dimension
            or x.shape[dimension] != heads
            or heads == 1
        ):
            return x
        return x.narrow(dimension, first, own)

    def whole_row(x: torch.Tensor) -> torch.Tensor:
        # Key heads that the ranks do not divide are repeated, so each rank has its queries' keys.
        copies = math.lcm(x.shape[1], ranks) // x.shape[1]
        return heads_all_to_all(
            x.repeat_interleave(copies, dim=1) if copies > 1 else x, split=1, join=2, group=group
        )

    query, key, value = whole_row(query), whole_row(key), whole_row(value)
    values: dict[str, Any] = {}
    if hasattr(module, "num_key_value_groups"):
        values["num_key_value_groups"] = query.shape[1] // key.shape[1]
    if hasattr(module, "sinks"):
        values["sinks"] = of_own_heads(module.sinks, 0)
    if "s_aux" in kwargs:
        kwargs["s_aux"] = of_own_heads(kwargs["s_aux"], 0)
    mask = of_own_heads(attention_mask, 1)
    output, _ = inner(_LocalHeadsView(module, values), query, key, value, mask, *args, **kwargs)
    return heads_all_to_all(output, split=1, join=2, group=group), None


# The shard of a sequence that a context rank trains on.


def contiguous_shard(batch: MicroBatch, rank: int, ranks: int) -> MicroBatch:
    """Return S/s neighbouring tokens of each sequence; the batch itself with one rank.

    Labels are shifted first, because a shard's last label is the next shard's first token.
    position_ids stay those of the whole sequences. The label of a token whose score is read stays
    with it.
    """
    if ranks == 1:
        return batch
    labels = batch.labels
    if not batch.scored:
        labels = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)

    def own(x: torch.Tensor) -> torch.Tensor:
        return x.chunk(ranks, dim=1)[rank].contiguous()

    completions = batch.completions
    if completions is not None:
        completions = own(completions if batch.scored else completions.roll(-1, dims=1))
    teacher = batch.teacher
    if teacher is not None:
        ids, log_probabilities = (own(x.roll(-1, dims=1)) for x in teacher)
        teacher = ids, log_probabilities
    return replace(
        batch,
        input_ids=own(batch.input_ids),
        labels=own(labels),
        shifted=True,
        completions=completions,
        teacher=teacher,
    )


class ContextParallel:
    """Switch context parallelism on; one a process, as transformers' functions are."""

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None
        self._model: nn.Module | None = None
        self._patches = ExitStack()
        self._positions: torch.Tensor | None = None

    def use(self, group: dist.ProcessGroup | None, model: nn.Module | None = None) -> None:
        """Switch to a group of ranks with neighbouring shards, in its order; None or one rank
        switches off.

        model: the trained one, whose rotary embeddings may depend on the length
        """
        self._patches.close()
        self._group = self._model = self._positions = None
        if group is None or dist.get_world_size(group) == 1:
            return
        self._group, self._model = group, model
        if model is not None:
            self._patches.enter_context(full_sequence_rope(model, self._last))
        get, preprocess, remap = (
            AttentionInterface.get_interface,
            masking_utils._preprocess_mask_arguments,
            masking_utils.remap_positions_for_packed_sequence,
        )

        def interface(self: AttentionInterface, *args: Any, **kwargs: Any) -> Attention:
            return partial(ulysses_attention, get(self, *args, **kwargs), group)

        for owner, name, replacement in (
            (AttentionInterface, "get_interface", interface),
            (
                masking_utils,
                "_preprocess_mask_arguments",
                partial(self._mask_arguments, preprocess),
            ),
            (
                masking_utils,
                "remap_positions_for_packed_sequence",
                lambda mask_function, position_ids: remap(mask_function, self._positions),
            ),
        ):
            self._patches.enter_context(patch.object(owner, name, replacement))

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Disable context parallelism inside, for a model on whole sequences beside the trained
        one."""
        group, model = self._group, self._model
        self.use(None)
        try:
            yield
        finally:
            self.use(group, model)

    def keywords(
        self, attention: str | None, input_ids: torch.Tensor, positions: torch.Tensor | None
    ) -> dict[str, Any]:
        """Return a forward's arguments beside `input_ids` (B, S/s).

        positions: (B, S) of the whole sequences where documents are packed, each counting from 0
        """
        given = packed_attention_arguments(attention, positions)
        if self._group is None:
            return given
        self._positions = positions
        length = input_ids.shape[1]
        first = dist.get_rank(self._group) * length
        if positions is None:
            own = torch.arange(first, first + length, device=input_ids.device).expand_as(input_ids)
        else:
            own = positions[:, first : first + length]
        return given | {"position_ids": own}

    def _last(self, position_ids: torch.Tensor) -> int:
        """Return models' rope Last of this rank's shard."""
        assert self._group is not None
        if self._positions is not None:
            return int(self._positions.max())
        return position_ids.shape[-1] * dist.get_world_size(self._group) - 1

    def _mask_arguments(
        self,
        inner: Any,
        config: Any,
        inputs_embeds: torch.Tensor,
        attention_mask: Any,
        cache: Any,
        position_ids: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """Call masking_utils._preprocess_mask_arguments with the whole sequence's lengths and
        documents."""
        if getattr(attention_mask, "ndim", 0) == 2:
            attention_mask = None  # the type's own is all ones: no sequence is padded
        done, mask, packed, queries, keys, *offsets = inner(
            config, inputs_embeds, attention_mask, cache, position_ids, *args, **kwargs
        )
        if done:
            return (done, mask, packed, queries, keys, *offsets)
        assert self._group is not None
        ranks = dist.get_world_size(self._group)
        if position_ids is not None and self._positions is not None:
            packed = masking_utils.find_packed_sequence_indices(self._positions)
        return (done, mask, packed, queries * ranks, keys * ranks, *offsets)


CONTEXT_PARALLEL = ContextParallel()

"""The switch of this process: while it is on, models of transformers run on one piece of each row.

Masks are made for whole rows, so that windows, chunks and packed documents are what they are
without context ranks. transformers makes them in one function, which counts the tokens that it is
handed. Rotary embeddings that depend on the length see whole rows, too
(models/rotary_embedding.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import distributed as dist
from torch import nn
from transformers import masking_utils
from transformers.modeling_utils import AttentionInterface

from shardwright.models.packed_attention import packed_attention_arguments
from shardwright.models.rotary_embedding import full_sequence_rope
from shardwright.parallel.context_attention import Attention, ulysses_attention


class ContextParallel:
    """One a process, as transformers' functions are."""

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None
        self._model: nn.Module | None = None
        self._patches = ExitStack()
        self._positions: torch.Tensor | None = None

    def use(self, group: dist.ProcessGroup | None, model: nn.Module | None = None) -> None:
        """None, or a group of one, switches it off. The ranks of the group hold neighbouring
        pieces, in its order. model: that is trained on pieces; its rotary embeddings may depend on
        the length."""
        self._patches.close()
        self._group = self._model = self._positions = None
        if group is None or dist.get_world_size(group) == 1:
            return
        self._group, self._model = group, model
        if model is not None:
            self._patches.enter_context(full_sequence_rope(model, self._last))
        get, preprocess, pack = (
            AttentionInterface.get_interface,
            masking_utils._preprocess_mask_arguments,
            masking_utils.packed_sequence_compatibility_function,
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
            (masking_utils, "packed_sequence_compatibility_function", partial(self._packed, pack)),
        ):
            self._patches.enter_context(patch.object(owner, name, replacement))

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Switched off inside: for a model of whole rows beside the one that is trained."""
        group, model = self._group, self._model
        self.use(None)
        try:
            yield
        finally:
            self.use(group, model)

    def keywords(
        self, attention: str | None, input_ids: torch.Tensor, positions: torch.Tensor | None
    ) -> dict[str, Any]:
        """What a model's forward takes beside `input_ids` (B, S/s). positions: (B, S) of the whole
        rows where documents are packed, each counting from 0."""
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
        """hf.rope.Last of this rank's piece."""
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
        past_key_values: Any,
        position_ids: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """masking_utils._preprocess_mask_arguments, with the lengths and documents of the whole
        row."""
        if getattr(attention_mask, "ndim", 0) == 2:
            attention_mask = None  # the type's own, of ones: no row is padded
        done, mask, packed, queries, keys, *offsets = inner(
            config, inputs_embeds, attention_mask, past_key_values, position_ids, *args, **kwargs
        )
        if done:
            return (done, mask, packed, queries, keys, *offsets)
        assert self._group is not None
        ranks = dist.get_world_size(self._group)
        if position_ids is not None and self._positions is not None:
            packed = masking_utils.find_packed_sequence_indices(self._positions)
        return (done, mask, packed, queries * ranks, keys * ranks, *offsets)

    def _packed(
        self, inner: Any, mask_function: Any, position_ids: torch.Tensor, packed: torch.Tensor
    ) -> Any:
        return inner(mask_function, self._positions, packed)


CONTEXT_PARALLEL = ContextParallel()

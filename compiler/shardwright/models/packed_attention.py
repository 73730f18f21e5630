"""Prepare FlashAttention 2 and masks for packed documents, and emulate FlashAttention 2 in plain
PyTorch.

The compiler needs a model's structure and shapes on any machine; transformers builds one with flash
attention only where its package and a GPU are present.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import ModuleType
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel, masking_utils
from transformers import modeling_flash_attention_utils as library
from transformers.integrations import flash_attention

from shardwright.recipe.recipe_types import FLASH_ATTENTION_2

# Masks that separate packed documents, for models that hand their mask functions no positions.
# transformers' mask functions separate documents by positions; gpt_oss and opt give them none,
# bloom a mask of ones.


_MAKERS = {
    name: maker
    for name, maker in vars(masking_utils).items()
    if name.startswith("create_") and "position_ids" in inspect.signature(maker).parameters
}
_modules: WeakKeyDictionary[nn.Module, list[tuple[ModuleType, str]]] = WeakKeyDictionary()


@contextmanager
def packed_document_masks(model: nn.Module, positions: torch.Tensor | None) -> Iterator[None]:
    """Give the positions (B, S) of packed documents to the mask functions that `model` calls; None
    changes nothing."""
    with ExitStack() as stack:
        if positions is not None:
            if model not in _modules:
                names = dict.fromkeys(type(each).__module__ for each in model.modules())
                modules = [sys.modules[name] for name in names if name in sys.modules]
                _modules[model] = [
                    (module, name)
                    for module in modules
                    for name in _MAKERS
                    if hasattr(module, name)
                ]
            for module, name in _modules[model]:
                maker = partial(_make, getattr(module, name), positions)
                stack.enter_context(patch.object(module, name, maker))
        yield


def _make(maker: Callable[..., Any], positions: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Call a mask function with the positions; drop a mask of ones: no token of a packed sequence
    is padding."""
    bound = inspect.signature(maker).bind(*args, **kwargs)
    if bound.arguments.get("position_ids") is None:
        bound.arguments["position_ids"] = positions
    if getattr(bound.arguments.get("attention_mask"), "ndim", 0) == 2:
        bound.arguments["attention_mask"] = None
    return maker(*bound.args, **bound.kwargs)


_LOADED = (
    "_flash_fn",
    "_flash_varlen_fn",
    "_flash_with_kvcache_fn",
    "_pad_fn",
    "_unpad_fn",
    "_loaded_implementation",
    "_process_flash_kwargs_fn",
    "_process_with_kvcache_kwargs_fn",
)
"""The library's references to the kernels that it has loaded."""


def packed_attention_arguments(
    attention: str | None, position_ids: torch.Tensor | None
) -> dict[str, Any]:
    """Return the forward's arguments for packed documents.

    Masks follow the positions. Flash attention has no mask, and transformers derives its documents
    from the positions only for one sequence (_is_packed_sequence); so it gets their bounds in the
    flattened batch.
    attention: the implementation that runs.
    position_ids: (B, S); each document counts from 0.
    """
    if position_ids is None:
        return {}
    if attention != FLASH_ATTENTION_2:
        return {"position_ids": position_ids}
    flat = position_ids.reshape(-1)
    bounds = F.pad((flat == 0).nonzero().reshape(-1), (0, 1), value=flat.numel()).int()
    longest = int(bounds.diff().max())
    return {
        "position_ids": position_ids,
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
    }


@contextmanager
def emulate_flash_attention(*, shapes_only: bool = False) -> Iterator[None]:
    """Let models with flash attention be built and run without its package or a GPU.

    shapes_only: leave out windows and soft caps, which change no shape and save no bytes in the
        kernels.
    """
    adjust = PreTrainedModel._check_and_adjust_attn_implementation

    def checked(model: PreTrainedModel, name: str | None, **options: Any) -> str:
        return FLASH_ATTENTION_2 if name == FLASH_ATTENTION_2 else adjust(model, name, **options)

    fixed, varlen = (partial(f, shapes_only=shapes_only) for f in (_attend, _emulate_flash_varlen))
    functions = (fixed, varlen, None, library._pad_input, library._unpad_input)
    with ExitStack() as stack:
        for name in _LOADED:
            stack.enter_context(patch.object(library, name, None))
        stack.enter_context(
            patch.object(library, "_lazy_imports", lambda *args, **options: functions)
        )
        if shapes_only:
            # It reads the positions' values.
            stack.enter_context(patch.object(library, "_is_packed_sequence", lambda *args: False))
        # The kernels accept no fp32; these functions do.
        stack.enter_context(
            patch.object(flash_attention, "get_target_dtype", lambda query, module: None)
        )
        stack.enter_context(
            patch.object(PreTrainedModel, "_check_and_adjust_attn_implementation", checked)
        )
        yield


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    *,
    shapes_only: bool = False,
) -> torch.Tensor:
    """Compute flash_attn_func: (B, S, heads, head size), with fewer heads of keys and values than
    of queries."""
    query, key, value = (x.transpose(1, 2) for x in (q, k, v))
    if shapes_only or (window_size == (-1, -1) and not softcap):
        out = F.scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=dropout_p,
            is_causal=causal,
            scale=softmax_scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out.transpose(1, 2).contiguous()  # the kernels' layout
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = (query @ key.transpose(-1, -2)).float() * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    # Distance from a query back to a key.
    back = torch.arange(q.shape[1])[:, None] - torch.arange(k.shape[1])
    left, right = window_size[0], 0 if causal else window_size[1]
    hidden = ((back > left) & (left >= 0)) | ((-back > right) & (right >= 0))
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1).to(query.dtype)
    return (F.dropout(weights, dropout_p) @ value).transpose(1, 2).contiguous()


def _emulate_flash_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    *,
    shapes_only: bool = False,
) -> torch.Tensor:
    """Compute flash_attn_varlen_func: (tokens, heads, head size), the sequences concatenated."""
    sizes = cu_seqlens_q.diff().tolist()
    queries, keys, values = (torch.split(x, sizes) for x in (q, k, v))
    options = (dropout_p, softmax_scale, causal, window_size, softcap)
    documents = [
        _attend(query[None], key[None], value[None], *options, shapes_only=shapes_only)
        for query, key, value in zip(queries, keys, values, strict=True)
    ]
    return torch.cat(documents, dim=1)[0]

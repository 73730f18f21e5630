"""Activation checkpointing, the same under both engines: torch's non-reentrant checkpoint on module instances.

Re-entrant checkpointing loses the gradient where no input asks for one (the embedding stage) and drops keyword
arguments, which is how Hugging Face layers call their attention.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwright.modules.dropout import TENSOR_RANDOM


def recompute_forward(module: nn.Module) -> None:
    """Makes `module` keep only its inputs for backward."""
    # ZeRO-3 releases parameters between forward and recomputation, so their shapes differ then: no metadata check.
    module.forward = partial(
        checkpoint, module.forward, use_reentrant=False, determinism_check="none", context_fn=_contexts
    )


def _contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), TENSOR_RANDOM.recomputing()


def apply_recompute(decoder_layers: list[nn.Module], choice: str, attention_module: str) -> None:
    """choice: none | selective (the attention module) | full (the whole decoder layer)."""
    for layer in decoder_layers:
        if choice == "full":
            recompute_forward(layer)
        elif choice == "selective":
            recompute_forward(layer.get_submodule(attention_module))

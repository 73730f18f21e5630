"""Defects of the tested DeepSpeed versions that only a patched function can get around; each names its place."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.pipe.dualpipev import DualPipeVEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.schedule import ReduceTiedGrads

_norm_of_tensors = bf16_optimizer.get_global_norm_of_tensors


def _norm_of_possibly_no_tensors(input_tensors: list[torch.Tensor], **keywords: Any) -> torch.Tensor:
    """A rank may own no tensor that counts: a tied head's stage, on the tensor ranks that do not count the norm's
    replicated weights. DeepSpeed stacks an empty list there (runtime/utils.py, get_global_norm_of_tensors)."""
    tensors = list(input_tensors) or [torch.zeros(1, device=get_accelerator().current_device_name())]
    return _norm_of_tensors(input_tensors=tensors, **keywords)


def _keep_gradients(self: Any) -> None:
    """DeepSpeed clears half-precision gradients when the gradient of the module's output arrives (runtime/engine.py,
    _backward_prologue, in a hook). A chunked loss stands behind that output and computes with the head's weight: its
    gradient is there by then, and would be lost."""


_add_to_single_precision = bf16_optimizer.BF16_Optimizer.update_hp_grads


def _add_and_clear(self: Any, clear_lp_grads: bool = True) -> None:
    """They are cleared as soon as they are added to the fp32 ones instead, after each stage's backward pass."""
    _add_to_single_precision(self, clear_lp_grads=True)


_reduce_tied_gradients = PipelineEngine._exec_reduce_tied_grads


def _reduce_tied_where_they_are(self: Any) -> None:
    """ZeRO-1 that accumulates half-precision gradients in fp32 (bf16 with an offloaded optimizer, fp16 where the recipe
    asks for it) keeps them in `grad_accum`. DeepSpeed sums `grad` over the stages of a tied weight, which is empty by
    then (runtime/pipe/engine.py, _exec_reduce_tied_grads): each stage would train its own copy."""
    if not getattr(self.optimizer, "use_grad_accum_attribute", False):
        _reduce_tied_gradients(self)
        return
    for weight, group in self.module.get_tied_weights_and_groups():
        if weight.grad_accum is not None:
            dist.all_reduce(weight.grad_accum, group=group)


def apply_fixes() -> None:
    for engine in (PipelineEngine, DualPipeVEngine):  # each has a map of its own
        engine._INSTRUCTION_MAP[ReduceTiedGrads] = _reduce_tied_where_they_are
    bf16_optimizer.get_global_norm_of_tensors = _norm_of_possibly_no_tensors
    bf16_optimizer.BF16_Optimizer.backward_prologue = _keep_gradients
    bf16_optimizer.BF16_Optimizer.update_hp_grads = _add_and_clear

"""Defects of the tested DeepSpeed versions that only a patched function can get around; each names its place."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import bf16_optimizer

_norm_of_tensors = bf16_optimizer.get_global_norm_of_tensors


def _norm_of_possibly_no_tensors(input_tensors: list[torch.Tensor], **keywords: Any) -> torch.Tensor:
    """A rank may own no tensor that counts: a tied head's stage, on the tensor ranks that do not count the norm's
    replicated weights. DeepSpeed stacks an empty list there (runtime/utils.py, get_global_norm_of_tensors)."""
    tensors = list(input_tensors) or [torch.zeros(1, device=get_accelerator().current_device_name())]
    return _norm_of_tensors(input_tensors=tensors, **keywords)


def apply_fixes() -> None:
    bf16_optimizer.get_global_norm_of_tensors = _norm_of_possibly_no_tensors

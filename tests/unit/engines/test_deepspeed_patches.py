"""The patches of DeepSpeed's functions are where its engines look for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.pipe.dualpipev import DualPipeVEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.schedule import ReduceTiedGrads

from shardwright.engines.deepspeed import deepspeed_patches as deepspeed_fixes


@pytest.mark.parametrize("engine", [PipelineEngine, DualPipeVEngine])
def test_tied_gradients_are_summed_where_zero_accumulates_them(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bf16 with an offloaded optimizer: `grad` is empty when the stages of a tied weight meet.
    tests/parity trains it (gpt2-bf16-offload-pp2)."""
    deepspeed_fixes.patch_deepspeed()
    summed: list[torch.Tensor] = []
    monkeypatch.setattr("deepspeed.comm.all_reduce", lambda tensor, group: summed.append(tensor))
    weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    weight.grad_accum = torch.ones(2)  # type: ignore[attr-defined]
    module = SimpleNamespace(get_tied_weights_and_groups=lambda: [(weight, None)])
    pipeline = SimpleNamespace(
        module=module, optimizer=SimpleNamespace(use_grad_accum_attribute=True)
    )
    engine._INSTRUCTION_MAP[ReduceTiedGrads](pipeline)
    assert [id(tensor) for tensor in summed] == [id(weight.grad_accum)]  # type: ignore[attr-defined]

"""The patches of DeepSpeed's functions are where its engines look for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.pipe.dualpipev import DualPipeVEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.schedule import ReduceTiedGrads
from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator

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


def test_a_new_trace_decides_what_is_released() -> None:
    """Passes without a backward one release a layer's parameters after its forward pass; training
    keeps them for its backward pass."""
    deepspeed_fixes.patch_deepspeed()
    layer = torch.nn.Linear(2, 2, bias=False)
    for name, value in (("ds_id", 7), ("ds_persist", False), ("ds_numel", 4)):
        setattr(layer.weight, name, value)
    layer.ds_external_parameters = dict  # type: ignore[assignment]
    found = coordinator.PartitionedParameterCoordinator(0, 10, 10, None, {})
    private = "_PartitionedParameterCoordinator__"

    def released(*trace: torch.nn.Module) -> set[int]:
        setattr(found, private + "trace_mode", coordinator.ZeRoTraceMode.COMPLETE)
        setattr(found, private + "submodule_order", trace)
        ids: set[int] = getattr(found, private + "params_to_release")(layer, 1)
        return ids

    assert released(layer) == {7}
    found._invalidate_trace()
    assert released(layer, layer) == set()

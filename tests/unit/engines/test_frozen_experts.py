"""Under expert ranks DeepSpeed hears of experts only where some of them are trained."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from shardwright.engines.deepspeed.deepspeed_groups import parameter_groups

NAMES = [f"layers.{layer}.experts.gate_up_proj" for layer in range(2)]


@pytest.mark.parametrize("frozen", [(), NAMES[:1], NAMES])
def test_a_layer_of_experts_is_told_of_where_one_is_trained(frozen: tuple[str, ...]) -> None:
    plan: Any = SimpleNamespace(
        strategy=SimpleNamespace(expert=2, pipeline=1),
        optimizer=SimpleNamespace(weight_decay=0.1),
        experts=("layers.0.experts", "layers.1.experts"),
        model=SimpleNamespace(is_frozen=lambda name: name in frozen),
        tensor_parallel=SimpleNamespace(
            modules=[SimpleNamespace(parameters=[SimpleNamespace(name=name)]) for name in NAMES]
        ),
        muon={},
        is_expert_parameter=lambda name: name.endswith("experts.gate_up_proj"),
    )
    module = nn.Linear(2, 2)
    parameter_groups(plan, module)
    assert hasattr(module, "expert_marker") == (len(frozen) < len(NAMES))

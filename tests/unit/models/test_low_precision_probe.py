"""Try the linears that low precision converts on a tiny copy of the model (SW3222)."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from shardwright.diagnostics import Refusal
from shardwright.models import model_probe
from tests.unit.models.factory import SMALL_LLAMA, graph_of

LINEARS = ("model.layers.0.mlp.up_proj", "model.layers.1.self_attn.q_proj")


def refused(*paths: str) -> str:
    with pytest.raises(Refusal) as caught:
        model_probe.check_low_precision(graph_of(SMALL_LLAMA), paths)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "SW3222"
    return diagnostic.message


def test_linears_that_are_called_are_converted() -> None:
    model_probe.check_low_precision(graph_of(SMALL_LLAMA), LINEARS)


def test_another_module_is_refused() -> None:
    message = refused(*LINEARS, "model.layers.0.input_layernorm")
    assert message.endswith("model.layers.0.input_layernorm is a LlamaRMSNorm")


def test_a_linear_that_is_never_called_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = model_probe._random_model

    def with_an_idle_linear(*args: Any, **more: Any) -> Any:
        model: Any = plain(*args, **more)
        model.model.layers[0].idle = nn.Linear(4, 4)
        return model

    monkeypatch.setattr(model_probe, "_random_model", with_an_idle_linear)
    assert refused(*LINEARS, "model.layers.0.idle").endswith("never calls model.layers.0.idle")

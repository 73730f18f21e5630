"""Types that transformers maps to image-text-to-text and that are none for this task: refused by name, with a code."""

from __future__ import annotations

import pytest

from shardwright.diagnostics import Refusal
from shardwright.model.build import build_model_graph
from tests.unit.model.factory import model_section


@pytest.mark.parametrize("model_type", ["florence2", "udop", "mistral4", "pi0"])
def test_they_are_refused_by_name(model_type: str) -> None:
    """`make prove PIECES=zoo-sight` asks all ten."""
    with pytest.raises(Refusal) as caught:
        build_model_graph(model_section({"model_type": model_type}, task="image-text-to-text"))
    (found,) = caught.value.diagnostics
    assert found.code.startswith("SW") and found.severity == "error"
    assert model_type in found.message and found.help

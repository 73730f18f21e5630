"""Types that transformers maps to image-text-to-text and that are none for this task: refused by
name, with a code."""

from __future__ import annotations

import pytest

from shardwright.diagnostics import Refusal
from shardwright.models.graph_builder import build_model_graph
from tests.unit.models.factory import model_section


@pytest.mark.parametrize(
    ("model_type", "code"),
    [("florence2", "SW2017"), ("udop", "SW2017"), ("mistral4", "SW2016"), ("pi0", "SW2016")],
)
def test_they_are_refused_by_name(model_type: str, code: str) -> None:
    """`make prove PIECES=zoo-vlm` asks all ten."""
    with pytest.raises(Refusal) as caught:
        build_model_graph(model_section({"model_type": model_type}, task="image-text-to-text"))
    (found,) = caught.value.diagnostics
    assert found.code == code and found.severity == "error"
    assert model_type in found.message and found.help

"""A composite whose text part has no sdpa: the text part's attention is recorded, and the ranks can
build it."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoConfig

from shardwright.diagnostics import Refusal
from shardwright.models.graph_trace import trace_model_graph
from shardwright.models.tasks.task_registry import IMAGE_TEXT, text_attention
from tests.parity.vision_language import MODELS


def test_each_part_computes_with_its_own() -> None:
    graph = trace_model_graph(copy.deepcopy(MODELS["paligemma2"]), "auto", inline=True)
    assert graph.attention == "eager"
    config = AutoConfig.for_model(**copy.deepcopy(MODELS["paligemma2"]))
    with torch.device("meta"):
        assert text_attention(IMAGE_TEXT.build(config, graph.attention).config) == "eager"


def test_a_pin_that_the_text_part_does_not_have_is_refused() -> None:
    with pytest.raises(Refusal) as refused:
        trace_model_graph(copy.deepcopy(MODELS["paligemma2"]), "sdpa", inline=True)
    assert [d.code for d in refused.value.diagnostics] == ["SW2008"]


def test_a_part_that_lacks_what_the_text_has_takes_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same weights are drawn as by a plain process, though the first try draws some."""
    from transformers import SiglipVisionModel
    from transformers.models.siglip.modeling_siglip import SiglipPreTrainedModel

    for kind in (SiglipPreTrainedModel, SiglipVisionModel):
        monkeypatch.setattr(kind, "_supports_sdpa", False)
    torch.manual_seed(5)
    made = IMAGE_TEXT.build(AutoConfig.for_model(**_paligemma()), "sdpa")
    torch.manual_seed(5)
    plain = IMAGE_TEXT.build(AutoConfig.for_model(**_paligemma()))
    assert made.config.text_config._attn_implementation == "sdpa"
    assert made.config.vision_config._attn_implementation == "eager"
    for (name, own), other in zip(made.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(own, other), name


def _paligemma() -> dict[str, object]:
    return {"model_type": "paligemma", **copy.deepcopy(MODELS["paligemma"])}

"""Which parameters Muon orthogonalizes, and the matrices that they join."""

from __future__ import annotations

import pytest

from shardwright.layout.muon_matrices import (
    muon_parameters,
    muon_parts,
    newton_schulz_flops,
    unsplit_parameter,
)
from shardwright.models.model_graph import ModelGraph
from shardwright.utils.json_values import JsonValue
from tests.unit.models.factory import SMALL_GPT2, SMALL_LLAMA, graph_of

MIXTURE: dict[str, JsonValue] = {
    **SMALL_LLAMA,
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}


def by_name(graph: ModelGraph, name: str) -> int:
    [parameter] = [p for layer in graph.layers for p in layer.parameters if p.name == name]
    return newton_schulz_flops(graph, parameter, steps=5)


def test_matrices_of_decoder_layers_alone() -> None:
    graph = graph_of({**SMALL_LLAMA, "attention_bias": True})
    names = {p.name for p in muon_parameters(graph, ())}
    expected = {
        p.name
        for layer in graph.layers
        for p in layer.parameters
        if layer.kind == "decoder" and p.name.endswith("_proj.weight")
    }
    assert names == expected
    every = {p.name for layer in graph.layers for p in layer.parameters}
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"} <= every - names


def test_joined_matrices_are_separate() -> None:
    width = SMALL_GPT2["n_embd"]
    parts = muon_parts(graph_of(SMALL_GPT2), ())
    assert parts["transformer.h.*.attn.c_attn.weight"] == (width, width, width)
    assert parts["transformer.h.*.attn.c_proj.weight"] == ()
    experts = muon_parts(graph_of(MIXTURE), ())
    assert experts["model.layers.*.mlp.experts.gate_up_proj"] == (48, 48)
    assert experts["model.layers.*.mlp.experts.down_proj"] == ()
    assert unsplit_parameter(graph_of(MIXTURE), ()) is None


@pytest.mark.parametrize("model_type", ["gpt_neox", "phi3"])
def test_an_unknown_order_of_joined_matrices_is_told(model_type: str) -> None:
    config: dict[str, JsonValue] = {
        "model_type": model_type,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "vocab_size": 257,
        "pad_token_id": 0,
    }
    graph = graph_of(config)
    joined = unsplit_parameter(graph, ())
    assert joined is not None and "qkv" in joined.name.replace("query_key_value", "qkv")
    assert unsplit_parameter(graph, ("text",)) is None


def test_frozen_layers_have_names_of_their_own() -> None:
    graph = graph_of(SMALL_LLAMA)
    parts = muon_parts(graph, ("model.layers.0.*",))
    assert "model.layers.1.mlp.up_proj.weight" in parts
    assert not any("*" in name or ".layers.0." in name for name in parts)


def test_flops_of_iterations() -> None:
    """4 m^2 n + 2 m^3 an iteration, of each matrix by itself."""
    width = int(str(SMALL_GPT2["n_embd"]))
    gpt2 = graph_of(SMALL_GPT2)
    assert by_name(gpt2, "transformer.h.0.attn.c_attn.weight") == 3 * 5 * 6 * width**3
    feed_forward = 5 * (4 * width**2 * (4 * width) + 2 * width**3)
    assert by_name(gpt2, "transformer.h.0.mlp.c_fc.weight") == feed_forward
    hidden = int(str(MIXTURE["hidden_size"]))
    low, high = sorted((48, hidden))
    experts = 4 * 2 * 5 * (4 * low**2 * high + 2 * low**3)
    assert by_name(graph_of(MIXTURE), "model.layers.0.mlp.experts.gate_up_proj") == experts

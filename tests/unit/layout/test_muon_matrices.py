"""Which parameters Muon orthogonalizes, and the matrices that they join."""

from __future__ import annotations

import pytest

from shardwright.layout.fused_weights import JoinedMatrices
from shardwright.layout.muon_matrices import (
    muon_matrices,
    muon_parameters,
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
    joined = muon_matrices(graph_of(SMALL_GPT2), ())
    assert joined["transformer.h.*.attn.c_attn.weight"].rows == (width, width, width)
    assert joined["transformer.h.*.attn.c_proj.weight"] == JoinedMatrices()
    experts = muon_matrices(graph_of(MIXTURE), ())
    assert experts["model.layers.*.mlp.experts.gate_up_proj"].rows == (48, 48)
    assert experts["model.layers.*.mlp.experts.down_proj"] == JoinedMatrices()
    assert unsplit_parameter(graph_of(MIXTURE), ()) is None


@pytest.mark.parametrize("model_type", ["mamba", "falcon_mamba"])
def test_an_unknown_order_of_joined_matrices_is_told(model_type: str) -> None:
    config: dict[str, JsonValue] = {
        "model_type": model_type,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "vocab_size": 257,
    }
    graph = graph_of(config)
    joined = unsplit_parameter(graph, ())
    assert joined is not None and joined.name.endswith("mixer.in_proj.weight")
    assert unsplit_parameter(graph, ("text",)) is None


def test_frozen_layers_have_names_of_their_own() -> None:
    graph = graph_of(SMALL_LLAMA)
    joined = muon_matrices(graph, ("model.layers.0.*",))
    assert "model.layers.1.mlp.up_proj.weight" in joined
    assert not any("*" in name or ".layers.0." in name for name in joined)


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


def test_flops_of_matrices_that_alternate_are_those_of_separate_ones() -> None:
    config: dict[str, JsonValue] = {
        "model_type": "gpt_neox",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "vocab_size": 257,
    }
    name = "gpt_neox.layers.0.attention.query_key_value.weight"
    assert by_name(graph_of(config), name) == 3 * 5 * 6 * 64**3


def test_flops_of_experts_that_end_in_inputs_and_outputs() -> None:
    config: dict[str, JsonValue] = {
        **SMALL_LLAMA,
        "model_type": "gpt_oss",
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 48,
    }
    graph = graph_of(config)
    of_one = 4 * 48**2 * 64 + 2 * 48**3
    experts = "model.layers.0.mlp.experts"
    assert by_name(graph, f"{experts}.gate_up_proj") == 4 * 2 * 5 * of_one
    assert by_name(graph, f"{experts}.down_proj") == 4 * 5 * of_one

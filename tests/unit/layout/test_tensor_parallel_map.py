"""Stage 5b: the map covers every parameter once, in Hugging Face's own layout."""

from __future__ import annotations

import pytest
from deepspeed.module_inject.tp_shard import AutoTPMeta, get_shard_size_list

from shardwright.diagnostics import Refusal
from shardwright.layout.parameter_sharding import ParameterSharding, shard_sizes
from shardwright.layout.tensor_parallel_map import tensor_parallel_map
from shardwright.utils.json_values import JsonValue
from tests.unit.models.factory import LLAMA_8B, SMALL_GPT2, SMALL_LLAMA, graph_of

TIED_LLAMA: dict[str, JsonValue] = {
    **SMALL_LLAMA,
    "tie_word_embeddings": True,
    "attention_bias": True,
    "mlp_bias": True,
}


@pytest.mark.parametrize("config", [SMALL_LLAMA, TIED_LLAMA, SMALL_GPT2, LLAMA_8B])
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_every_parameter_once_and_most_of_it_cut(config: dict[str, JsonValue], degree: int) -> None:
    graph = graph_of(config)
    result = tensor_parallel_map(graph, degree)
    listed = [p.name for module in result.modules for p in module.parameters]
    assert sorted(listed) == sorted({p.name for layer in graph.layers for p in layer.parameters})
    assert len({module.module for module in result.modules}) == len(result.modules)
    for module in result.modules:
        for split in module.parameters:
            assert split.name.startswith(module.module + ".")
            shards = [split.shard_numel(rank) for rank in range(degree)]
            full = 1
            for size in split.shape:
                full *= size
            assert sum(shards) == (full if split.dimension is not None else full * degree)
    if degree == 1:
        assert result.sharded_fraction == 0
    else:
        assert result.sharded_fraction >= 0.95


def splits(config: dict[str, JsonValue], degree: int) -> dict[str, tuple[str, ParameterSharding]]:
    result = tensor_parallel_map(graph_of(config), degree)
    return {p.name: (module.style, p) for module in result.modules for p in module.parameters}


def test_llama_cuts() -> None:
    found = splits(TIED_LLAMA, 2)
    expected = {
        "model.embed_tokens.weight": ("vocabulary_embedding", 0, (130, 129)),
        "model.layers.1.self_attn.k_proj.weight": ("colwise", 0, (16, 16)),
        "model.layers.1.self_attn.k_proj.bias": ("colwise", 0, (16, 16)),
        "model.layers.1.self_attn.o_proj.weight": ("rowwise", 1, (32, 32)),
        "model.layers.1.self_attn.o_proj.bias": ("rowwise", None, ()),
        "model.layers.3.mlp.down_proj.weight": ("rowwise", 1, (64, 64)),
        "model.layers.3.input_layernorm.weight": ("replicated", None, ()),
        "model.norm.weight": ("replicated", None, ()),
    }
    for name, (style, dimension, sizes) in expected.items():
        assert (found[name][0], found[name][1].dimension, found[name][1].sizes) == (
            style,
            dimension,
            sizes,
        ), name


def test_gpt2_is_stored_transposed_and_fused() -> None:
    found = splits(SMALL_GPT2, 2)
    c_attn = found["transformer.h.0.attn.c_attn.weight"]
    assert c_attn[0] == "packed_colwise"
    assert (c_attn[1].shape, c_attn[1].dimension, c_attn[1].blocks, c_attn[1].sizes) == (
        (64, 192),
        1,
        (64, 64, 64),
        (96, 96),
    )
    assert found["transformer.h.0.attn.c_attn.bias"][1].blocks == (64, 64, 64)
    assert found["transformer.h.0.attn.c_proj.weight"][1].dimension == 0
    assert found["transformer.h.0.attn.c_proj.bias"][1].dimension is None
    assert found["transformer.h.0.mlp.c_fc.weight"][1].dimension == 1
    assert found["transformer.wpe.weight"][0] == "replicated"


@pytest.mark.parametrize("config", [TIED_LLAMA, SMALL_GPT2])
def test_a_tied_head_lists_no_parameter_of_its_own(config: dict[str, JsonValue]) -> None:
    head = tensor_parallel_map(graph_of(config), 2).modules[-1]
    assert (head.module, head.style, head.parameters) == ("lm_head", "vocabulary_head", ())


def test_an_untied_head_is_cut_over_the_vocabulary() -> None:
    head = tensor_parallel_map(graph_of(SMALL_LLAMA), 4).modules[-1]
    assert (head.module, head.style, head.parameters[0].sizes) == (
        "lm_head",
        "vocabulary_head",
        (65, 65, 65, 64),
    )


@pytest.mark.parametrize("total", [7, 50257, 128256])
@pytest.mark.parametrize("degree", [1, 2, 3, 4, 8])
def test_shards_are_deepspeeds(total: int, degree: int) -> None:
    assert list(shard_sizes(total, degree)) == get_shard_size_list(total, degree, AutoTPMeta())


def test_other_dimensions_must_divide() -> None:
    with pytest.raises(Refusal) as caught:
        tensor_parallel_map(graph_of(SMALL_LLAMA), 3)
    assert [d.code for d in caught.value.diagnostics] == ["SW3103"]


def test_fewer_key_value_heads_than_ranks_are_held_by_several() -> None:
    found = splits(SMALL_LLAMA, 8)  # eight heads, four key/value heads of eight features
    key = found["model.layers.0.self_attn.k_proj.weight"][1]
    assert (key.copies, key.sizes) == (2, (8,) * 8)
    assert [key.shard_ranges(rank) for rank in (0, 1, 2, 7)] == [
        ((0, 8),),
        ((0, 8),),
        ((8, 8),),
        ((24, 8),),
    ]
    assert found["model.layers.0.self_attn.q_proj.weight"][1].copies == 1


MIXTRAL: dict[str, JsonValue] = {
    **SMALL_LLAMA,
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


def test_experts_are_cut_inside_every_expert() -> None:
    found = splits(MIXTRAL, 2)
    gate_up = found["model.layers.0.mlp.experts.gate_up_proj"]
    assert gate_up[0] == "moe_tp_experts"
    assert (gate_up[1].shape, gate_up[1].dimension, gate_up[1].blocks) == (
        (4, 256, 64),
        1,
        (128, 128),
    )
    assert gate_up[1].shard_ranges(1) == ((64, 64), (192, 64))
    assert found["model.layers.0.mlp.experts.down_proj"][1].dimension == 2
    assert found["model.layers.0.mlp.gate.weight"] == (
        "replicated",
        ParameterSharding(
            name="model.layers.0.mlp.gate.weight",
            shape=(4, 64),
            dimension=None,
            blocks=(),
            sizes=(),
        ),
    )


def test_grouped_queries_are_cut_block_by_block() -> None:
    """Falcon-40B's layout is cut by groups; MPT's q, k, v stand one behind the other."""
    falcon: dict[str, JsonValue] = {
        "model_type": "falcon",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
    }
    grouped = splits(
        {**falcon, "new_decoder_architecture": True, "num_kv_heads": 4, "vocab_size": 260}, 2
    )
    fused = grouped["transformer.h.0.self_attention.query_key_value.weight"]
    assert (fused[0], fused[1].sizes, fused[1].blocks) == ("colwise", (64, 64), (128,))
    single = splits({**falcon, "multi_query": True, "vocab_size": 260}, 2)
    assert (
        single["transformer.h.0.self_attention.query_key_value.weight"][0] == "multi_query_colwise"
    )


def test_the_fallback_leaves_whole_what_does_not_divide() -> None:
    config = {
        **SMALL_LLAMA,
        "model_type": "hunyuan_v1_dense",
        "intermediate_size": 129,
        "head_dim": 8,
    }
    graph = graph_of(config)
    result = tensor_parallel_map(graph, 2)
    assert result.kind == "fallback"
    found = {p.name: (m.style, p.dimension) for m in result.modules for p in m.parameters}
    assert found["model.layers.0.self_attn.q_proj.weight"] == ("colwise_gather_output", 0)
    assert found["model.layers.0.mlp.up_proj.weight"] == ("replicated", None)
    assert found["model.layers.0.mlp.down_proj.weight"] == ("colwise_gather_output", 0)


def test_every_module_that_a_style_names_is_listed() -> None:
    modules = {m.module: m.style for m in tensor_parallel_map(graph_of(SMALL_GPT2), 2).modules}
    assert [modules[f"transformer.h.{i}.attn"] for i in range(4)] == ["local_heads"] * 4

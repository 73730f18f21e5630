"""Stage 5b: the map covers every parameter once, in Hugging Face's own layout."""

from __future__ import annotations

import pytest
from deepspeed.module_inject.tp_shard import AutoTPMeta, get_shard_size_list

from shardwright.diagnostics import Refusal
from shardwright.ir.json_value import JsonValue
from shardwright.ir.partition import ParameterSplit
from shardwright.partition.tensor import shard_sizes, tensor_parallel_map
from tests.unit.model.factory import LLAMA_8B, SMALL_GPT2, SMALL_LLAMA, graph_of

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


def splits(config: dict[str, JsonValue], degree: int) -> dict[str, tuple[str, ParameterSplit]]:
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
        assert (found[name][0], found[name][1].dimension, found[name][1].sizes) == (style, dimension, sizes), name


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
    assert (head.module, head.style, head.parameters[0].sizes) == ("lm_head", "vocabulary_head", (65, 65, 65, 64))


@pytest.mark.parametrize("total", [7, 50257, 128256])
@pytest.mark.parametrize("degree", [1, 2, 3, 4, 8])
def test_shards_are_deepspeeds(total: int, degree: int) -> None:
    assert list(shard_sizes(total, degree)) == get_shard_size_list(total, degree, AutoTPMeta())


def test_other_dimensions_must_divide() -> None:
    with pytest.raises(Refusal) as caught:
        tensor_parallel_map(graph_of(SMALL_LLAMA), 3)
    assert [d.code for d in caught.value.diagnostics] == ["SW3103"]

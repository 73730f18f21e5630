"""Argument trees, tagged floats, and the shrinker's promises."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from shardwright.models import model_probe
from shardwright.models.config_schema import decode_special_floats, encode_special_floats
from shardwright.models.model_graph import PipelineSplit
from shardwright.models.model_skeleton import copy_containers, leaves, replace_arguments
from shardwright.models.tasks.task_registry import CAUSAL_LM
from shardwright.models.tiny_config import (
    LAYERS,
    VOCABULARY,
    has_every_layer_kind,
    representative_layers,
    shrink,
    truncate_layers,
)
from shardwright.utils.json_values import read_record


def test_leaves_and_replaced_speak_the_same_paths() -> None:
    call = ((1, (2, [3])), {"mask": {"full": 4, "sliding": None}, "x": 5})
    paths = dict(leaves(call))
    assert paths == {"0": 1, "1.0": 2, "1.1.0": 3, "mask.full": 4, "mask.sliding": None, "x": 5}
    new = replace_arguments(call, {path: f"new {path}" for path in paths})
    assert dict(leaves(new)) == {path: f"new {path}" for path in paths}
    assert dict(leaves(call)) == paths, "the original is left alone"
    assert isinstance(new[0][1], tuple) and isinstance(new[0][1][1], list)


def test_fresh_renews_containers_once_and_keeps_tensors() -> None:
    shared: dict[str, int] = {}
    tensor = torch.zeros(2)
    memo: dict[int, object] = {}
    first, second = (
        copy_containers(({"state": shared}, tensor), memo),
        copy_containers(({"state": shared}, tensor), memo),
    )
    assert first[1] is tensor
    assert first[0]["state"] is not shared and first[0]["state"] is second[0]["state"]
    first[0]["state"]["left"] = 1
    assert shared == {}


def test_infinity_survives_json() -> None:
    document = {"limit": [0.0, math.inf], "nested": {"low": -math.inf}, "n": 1}
    text = json.dumps(encode_special_floats(document), allow_nan=False)
    assert decode_special_floats(json.loads(text)) == document
    assert decode_special_floats({"__float__": "Infinity", "more": 1}) == {
        "__float__": "Infinity",
        "more": 1,
    }


def test_shrink_keeps_what_hangs_together() -> None:
    small = shrink(
        {
            "hidden_size": 3712,
            "attention_hidden_size": 7424,
            "attention_head_dim": 464,
            "num_attention_heads": 16,
        }
    )
    assert small["attention_hidden_size"] == 2 * small["hidden_size"]
    assert (
        small["attention_head_dim"] * small["num_attention_heads"] == small["attention_hidden_size"]
    )
    mamba = shrink({"hidden_size": 4096, "expand": 2, "num_heads": 128, "head_dim": 64})
    assert mamba["num_heads"] * mamba["head_dim"] == mamba["expand"] * mamba["hidden_size"]


def test_shrink_can_keep_depth_or_widths() -> None:
    document = {
        "num_hidden_layers": 30,
        "layer_types": ["a", "b"] * 15,
        "hidden_size": 4096,
        "vocab_size": 9000,
        "attention_dropout": 0.1,
    }
    assert shrink(document)["layer_types"] == ["a", "b"] * (LAYERS // 2)
    deep = shrink(document, depth=False)
    assert (deep["num_hidden_layers"], len(deep["layer_types"]), deep["hidden_size"]) == (
        30,
        30,
        64,
    )
    wide = shrink(document, widths=False)
    assert (wide["num_hidden_layers"], wide["hidden_size"], wide["vocab_size"]) == (
        LAYERS,
        4096,
        VOCABULARY,
    )
    assert all(d["attention_dropout"] == 0.0 for d in (deep, wide)), (
        "the probe compares bits in training mode"
    )


def test_shrink_of_rotary_tables() -> None:
    kinds = {"sliding": {"rope_type": "default", "rope_theta": 1.0}, "full": None}
    assert shrink({"rope_parameters": kinds})["rope_parameters"] == kinds
    yarn = {"rope_type": "yarn", "factor": 4.0, "llama_4_scaling_beta": 0.1}
    assert shrink({"rope_parameters": yarn})["rope_parameters"] == yarn


@pytest.mark.parametrize(("heads", "partial"), [(32, 1.0), (32, 0.5), (2, 1.0)])
def test_shrink_keeps_ropes_that_depend_on_the_length(heads: int, partial: float) -> None:
    """With their switch inside of the probes' texts, and a factor for each rotated pair of the
    small head."""
    long = {
        "rope_type": "longrope",
        "long_factor": [1.0 + i for i in range(48)],
        "short_factor": [1.0] * 48,
        "rope_theta": 1e4,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": partial,
    }
    sizes = {
        "hidden_size": 96 * heads,
        "num_attention_heads": heads,
        "max_position_embeddings": 131072,
    }
    small = shrink({**sizes, "rope_parameters": long})
    table = small["rope_parameters"]
    assert (table["rope_type"], table["original_max_position_embeddings"]) == ("longrope", 16)
    width = small["hidden_size"] // small["num_attention_heads"]
    assert len(table["long_factor"]) == len(table["short_factor"]) == int(width * partial) // 2
    assert table["long_factor"] == sorted(set(table["long_factor"]))
    dynamic = {"rope_type": "dynamic", "factor": 2.0}
    assert shrink({**sizes, "rope_parameters": dynamic})["max_position_embeddings"] == 16


def test_every_kind_of_layer_is_kept() -> None:
    document = {
        "num_hidden_layers": 8,
        "layer_types": ["s", "s", "s", "f"] * 2,
        "mlp_only_layers": [0],
        "no_rope_layers": [1, 1, 1, 0] * 2,
        "per_layer_config": {"3": {"head_dim": 512}, "7": {"head_dim": 512}},
        "eos_token_id": [5, 6],
    }
    kept = representative_layers(document)
    assert kept == (0, 1, 3, 0)
    assert truncate_layers(document, kept) == {
        "num_hidden_layers": 4,
        "layer_types": ["s", "s", "f", "s"],
        "mlp_only_layers": [0, 3],
        "no_rope_layers": [1, 1, 0, 1],
        "per_layer_config": {"2": {"head_dim": 512}},
    }


def test_a_period_makes_the_copy_deep_enough() -> None:
    assert len(representative_layers({"num_hidden_layers": 32, "attn_layer_period": 8})) == 9
    assert len(representative_layers({"num_hidden_layers": 32})) == LAYERS
    many = {"num_hidden_layers": 30, "layer_sizes": [*range(100, 130)]}
    assert representative_layers(many) == tuple(range(12))


def test_a_cut_with_all_that_crosses_survives_plan_json() -> None:
    cut = PipelineSplit(
        stack="model.layers",
        hidden_position=None,
        hidden_keyword="hidden_states",
        output_length=2,
        payload=("1", "position_embeddings.0"),
        carried=(1,),
        together=((1, 3), (4, 5)),
        loss="other",
        causal=False,
    )
    assert read_record(PipelineSplit, json.loads(json.dumps(dataclasses.asdict(cut)))) == cut


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("qwen3_moe", {"decoder_sparse_step": 5}),
        ("qwen3_moe", {"mlp_only_layers": [0, 1, 7]}),
        ("ernie4_5_moe", {"moe_layer_start_index": 8}),
        ("ernie4_5_moe", {"moe_layer_interval": 3}),
        ("deepseek_v3", {"first_k_dense_replace": 7}),
    ],
)
def test_a_shallow_copy_has_every_kind_of_layer(model_type: str, changes: dict[str, Any]) -> None:
    config = CONFIG_MAPPING[model_type](**changes)
    with torch.device("meta"):
        whole = CAUSAL_LM.build(config)
        copy = CAUSAL_LM.build(
            CONFIG_MAPPING[model_type].from_dict(CAUSAL_LM.small(config.to_dict()))
        )
    assert len(copy.model.layers) < len(whole.model.layers)
    assert has_every_layer_kind(whole, copy)


def test_a_kind_that_a_copy_lacks_is_seen() -> None:
    """Whatever the configuration calls it: here a layer that has a bias, and one of another
    class."""
    dense, biased = nn.Linear(2, 2, bias=False), nn.Linear(2, 2)
    whole, copy = (nn.Module() for _ in range(2))
    whole.layers, copy.layers = nn.ModuleList([dense, biased]), nn.ModuleList([dense, dense])
    assert has_every_layer_kind(copy, whole) and not has_every_layer_kind(whole, copy)
    whole.layers = nn.ModuleList([dense, nn.Bilinear(2, 2, 2, bias=False)])
    assert not has_every_layer_kind(whole, copy)
    assert not has_every_layer_kind(whole, nn.Linear(1, 1)), "its list of layers is not there"


def test_a_copy_that_lacks_a_kind_is_made_as_deep_as_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    plain = model_probe._probe

    def probe(model_type: str, task: Any, text: str, *more: Any, **keywords: Any) -> Any:
        asked.append(json.loads(text)["num_hidden_layers"])
        return plain(model_type, task, text, *more, **keywords)

    monkeypatch.setattr(model_probe, "_probe", probe)
    config = CONFIG_MAPPING["llama"](num_hidden_layers=6)
    with torch.device("meta"):
        model = CAUSAL_LM.build(config)
        model.model.layers[4].extra = nn.Linear(1, 1)
    model_probe.probe_config(config, CAUSAL_LM, "auto", (), model)
    assert asked == [6]

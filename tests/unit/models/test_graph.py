"""Stage 2: exact counts from the meta device, and every bad configuration refused with a code."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from shardwright.diagnostics import Refusal
from shardwright.models.graph_builder import build_model_graph
from shardwright.models.hf_config import resolve_config
from shardwright.utils.json_values import JsonValue
from tests.unit.models.factory import (
    LLAMA_8B,
    LLAMA_405B,
    SMALL_GPT2,
    SMALL_LLAMA,
    graph_of,
    model_section,
)
from tests.zoo import configs


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (LLAMA_8B, 8_030_261_248),  # Llama-3.1-8B's model card
        (LLAMA_405B, 405_853_388_800),
        ({"model_type": "gpt2"}, 124_439_808),  # tied: the head counts once
    ],
)
def test_published_parameter_counts(config: dict[str, JsonValue], parameters: int) -> None:
    assert graph_of(config).total_parameters == parameters


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "gpt2"])
@pytest.mark.parametrize("tied", [True, False])
def test_layers_hold_exactly_the_models_parameters(model_type: str, tied: bool) -> None:
    config = {**(SMALL_GPT2 if model_type == "gpt2" else SMALL_LLAMA), "model_type": model_type}
    config["tie_word_embeddings"] = tied
    graph = graph_of(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    expected = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert {p.name: p.shape for layer in graph.layers for p in layer.parameters} == expected
    assert graph.total_parameters == sum(p.numel() for p in model.parameters())
    assert [layer.kind for layer in graph.layers] == ["embedding", *["decoder"] * 4, "head"]
    embedding = model.get_input_embeddings().weight
    canonical = next(name for name, p in model.named_parameters() if p is embedding)
    assert graph.tied == (((canonical, "lm_head.weight"),) if tied else ())
    head = {p.name for p in graph.layers[-1].parameters}
    assert (canonical if tied else "lm_head.weight") in head


@pytest.mark.parametrize("config", [SMALL_LLAMA, SMALL_GPT2])
def test_flops_are_those_of_the_matrix_products(config: dict[str, JsonValue]) -> None:
    """Counted by torch itself over one forward pass at two lengths: linears grow with S, attention
    with S squared."""
    from torch.utils.flop_counter import FlopCounterMode

    graph = graph_of(config)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config), attn_implementation="eager"
    ).eval()
    for length in (16, 64):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(input_ids=torch.zeros(1, length, dtype=torch.long), use_cache=False)
        ours = sum(
            layer.matmul_flops_per_token + layer.attention_flops_per_token_per_position * length
            for layer in graph.layers
        )
        assert counter.get_total_flops() == ours * length


@pytest.mark.parametrize("config", [SMALL_LLAMA, SMALL_GPT2])
def test_the_recorded_config_builds_the_same_model(config: dict[str, JsonValue]) -> None:
    graph = graph_of(config)
    again = build_model_graph(model_section(dict(graph.config)))
    assert again == graph
    json.dumps(graph.config)


def test_a_local_folder_gives_the_same_graph_and_leaves_no_path(tmp_path: Path) -> None:
    folder = tmp_path / "my model"
    folder.mkdir()
    written = {
        **SMALL_LLAMA,
        "_name_or_path": str(folder),
        "transformers_version": "4.1",
        "an_old_key": 1,
    }
    (folder / "config.json").write_text(json.dumps(written))
    graph = build_model_graph(model_section(None, source=str(folder)))
    inline = graph_of(SMALL_LLAMA)
    assert graph.layers == inline.layers
    assert str(tmp_path) not in json.dumps(graph.config)
    assert (
        dataclasses.replace(graph, config=inline.config, config_hash=inline.config_hash) == inline
    )


def test_attention_is_what_transformers_picks_or_the_pinned_one() -> None:
    assert graph_of(SMALL_LLAMA).attention == "sdpa"
    assert build_model_graph(model_section(SMALL_LLAMA, attention="eager")).attention == "eager"


GEMMA2: dict[str, JsonValue] = {
    **SMALL_LLAMA,
    "model_type": "gemma2",
    "head_dim": 16,
    "sliding_window": 8,
}


@pytest.mark.parametrize(
    "config", [SMALL_LLAMA, SMALL_GPT2, GEMMA2], ids=lambda config: config["model_type"]
)
def test_flash_attention_is_traced_without_its_kernels(config: dict[str, JsonValue]) -> None:
    """It computes and keeps what the other fused attention does, and no mask: windows and soft caps
    keep no scores."""
    eager, flash = (
        build_model_graph(model_section(config, attention=name))
        for name in ("eager", "flash_attention_2")
    )
    assert flash.attention == "flash_attention_2"
    assert [layer.parameters for layer in flash.layers] == [
        layer.parameters for layer in eager.layers
    ]
    kept = [entry for layer in flash.layers[1:-1] for entry in layer.kept]
    assert kept
    assert all(
        entry.unsharded_bytes_per_token_pair == entry.sharded_bytes_per_token_pair == 0
        for entry in kept
    )
    if config["model_type"] != "gemma2":
        sdpa = build_model_graph(model_section(config, attention="sdpa"))
        assert dataclasses.replace(flash, attention="sdpa") == sdpa


def test_flash_attention_where_the_kernels_lack_something() -> None:
    """gpt_oss's sinks are in other kernels than flash-attn 2's, and transformers says so; gpt_neo's
    are not said."""
    sinks: dict[str, JsonValue] = {
        **SMALL_LLAMA,
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "head_dim": 16,
    }
    assert refused(sinks, attention="flash_attention_2") == [("SW2008", ("model", "attention"))]


def refused(
    section_config: object, **changes: str
) -> list[tuple[str, tuple[str | int, ...] | None]]:
    with pytest.raises(Refusal) as caught:
        build_model_graph(model_section(section_config, **changes))  # type: ignore[arg-type]
    for d in caught.value.diagnostics:
        assert "\n" not in d.message and d.help
    return [(d.code, d.key) for d in caught.value.diagnostics]


C = ("model", "config")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": "lama"}, [("SW2003", (*C, "model_type"))]),
        ({"model_type": "vit"}, [("SW2004", (*C, "model_type"))]),
        ({"model_type": "t5"}, [("SW2017", (*C, "model_type"))]),
        ({"hiden_size": 64}, [("SW2005", (*C, "hiden_size"))]),
        ({"hidden_size": "64"}, [("SW2006", (*C, "hidden_size"))]),
        ({"hidden_size": 64, "num_attention_heads": 7}, [("SW2007", C)]),
        ({"num_key_value_heads": 3}, [("SW2007", (*C, "num_key_value_heads"))]),
        ({"head_dim": 7}, [("SW2007", C)]),
        ({"hidden_act": "magic"}, [("SW2007", C)]),
        ({"rope_scaling": {"rope_type": "nope", "factor": 2.0}}, [("SW2007", C)]),
        # All independent errors at once.
        (
            {"hiden_size": 64, "vocab_size": 0, "num_hidden_layers": -1},
            [
                ("SW2006", (*C, "vocab_size")),
                ("SW2006", (*C, "num_hidden_layers")),
                ("SW2005", (*C, "hiden_size")),
            ],
        ),
    ],
)
def test_bad_configurations(changes: dict[str, JsonValue], expected: list[object]) -> None:
    assert sorted(refused({**SMALL_LLAMA, **changes}), key=str) == sorted(expected, key=str)


def test_other_refusals(tmp_path: Path) -> None:
    assert refused(None, source=str(tmp_path)) == [("SW2002", ("model", "source"))]
    (tmp_path / "config.json").write_text("[1")
    assert refused(None, source=str(tmp_path)) == [("SW2002", ("model", "source"))]
    assert refused({"model_type": "gpt2", "n_embd": 10, "n_head": 3}) == [("SW2007", C)]
    assert refused({**SMALL_GPT2, "add_cross_attention": True}) == [
        ("SW2009", (*C, "add_cross_attention"))
    ]
    assert refused({**SMALL_GPT2, "attn_pdrop": 1.5}) == [("SW2006", (*C, "attn_pdrop"))]
    assert refused(SMALL_LLAMA, attention="paged") == [("SW2008", ("model", "attention"))]


def test_did_you_mean() -> None:
    with pytest.raises(Refusal) as caught:
        build_model_graph(model_section({**SMALL_LLAMA, "hiden_size": 64}))
    assert "hidden_size" in caught.value.diagnostics[0].valid


def test_an_encoder_decoder_trains_only_when_its_decoder_is_meant() -> None:
    assert refused({"model_type": "bart"}) == [("SW2017", (*C, "model_type"))]
    both: dict[str, JsonValue] = {"model_type": "whisper", "is_encoder_decoder": True}
    assert refused(both) == [("SW2017", (*C, "is_encoder_decoder"))]
    alone = resolve_config(
        {"model_type": "mbart", "is_encoder_decoder": False, "is_decoder": True}, C, True
    )
    assert not alone.is_encoder_decoder


@pytest.mark.parametrize("model_type", ["emu3", "mllama"])
def test_a_class_that_keeps_only_the_text_part_of_its_type(model_type: str) -> None:
    """The built model's own configuration is of a type that is no causal LM by name."""
    assert build_model_graph(model_section(configs.tiny_config(model_type))).layers

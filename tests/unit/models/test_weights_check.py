"""Weights against the model before any rank starts: what is missing, left over, of another shape,
quantised or tied."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

from shardwright.cli.main import main
from shardwright.diagnostics import Refusal
from shardwright.models.graph_builder import build_model_graph, compare_weights
from shardwright.models.model_sources import weights_problem
from shardwright.models.weights_check import read_headers, same_values
from shardwright.parallel.weight_files import WeightFiles
from shardwright.parallel.weight_loader import WeightLoader, empty_model
from shardwright.recipe.recipe_types import ModelSection
from tests.unit.models.quantized_weights import quantise_fp8, quantise_mxfp4
from tests.zoo.configs import build, tiny_config

FILE = "model.safetensors"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def section(folder: Path) -> ModelSection:
    return ModelSection(
        source=str(folder),
        config=None,
        revision="main",
        weights="pretrained",
        attention="auto",
        loss="auto",
    )


def found(folder: Path) -> list[tuple[str, str, str]]:
    """(severity, code, message) of what compile says of the weights."""
    asked = section(folder)
    try:
        diagnostics = compare_weights(asked, build_model_graph(asked))
    except Refusal as refusal:
        diagnostics = refusal.diagnostics
    return [(d.severity, d.code, d.message) for d in diagnostics]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny Llama with a head of its own."""
    build("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def rewrite(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor] | None]
) -> None:
    tensors = load_file(folder / FILE)
    changed = change(tensors)
    save_file(
        {k: v.contiguous() for k, v in (changed or tensors).items()},
        folder / FILE,
        metadata={"format": "pt"},
    )


def configure(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


TYPES = (
    "llama",
    "gpt2",
    "qwen2",
    "phi3",
    "mixtral",
    "qwen3_moe",
    "deepseek_v3",
    "gpt_oss",
    "bloom",
    "gemma2",
    "gemma3_text",
)


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(t, marks=() if t in ("gpt2", "phi3", "deepseek_v3") else pytest.mark.prove)
        for t in TYPES
    ],
)
def test_what_save_pretrained_writes_is_loaded_whole(model_type: str, tmp_path: Path) -> None:
    build(model_type).save_pretrained(tmp_path, max_shard_size="100KB")
    assert found(tmp_path) == []


def with_biases(tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in list(tensors.items()):
        if name.endswith("layernorm.weight"):
            tensors[name.replace("weight", "bias")] = torch.zeros(tensor.shape[0])


def with_a_further_layer(tensors: dict[str, torch.Tensor]) -> None:
    last = max(int(name.split(".")[2]) for name in tensors if ".layers." in name)
    for name in [name for name in tensors if f".layers.{last}." in name]:
        tensors[name.replace(f".{last}.", f".{last + 1}.")] = tensors[name].clone()


def without(tensors: dict[str, torch.Tensor], name: str) -> None:
    del tensors[name]


def prefixed(prefix: str) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    return lambda tensors: {prefix + name: tensor for name, tensor in tensors.items()}


def padded(tensors: dict[str, torch.Tensor]) -> None:
    for name in (EMBEDDING, HEAD):
        tensors[name] = torch.cat([tensors[name], torch.zeros(5, tensors[name].shape[1])])


CASES: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str, str, str]] = {
    "biases": (with_biases, "warning", "SW2023", "biases that the configuration does not have"),
    "a further decoder layer": (
        with_a_further_layer,
        "warning",
        "SW2023",
        "decoder layers that the configuration",
    ),
    "multi-token prediction": (
        lambda t: t.update({"mtp.fc.weight": torch.zeros(2, 2)}),
        "warning",
        "SW2023",
        (
            "1 tensor in the files (multi-token prediction) is not loaded, trained or exported: "
            "mtp.fc.weight"
        ),
    ),
    "a vision encoder": (
        lambda t: t.update({"visual.patch_embed.weight": torch.zeros(2, 2)}),
        "warning",
        "SW2023",
        "vision encoder",
    ),
    "a missing tensor": (
        lambda t: without(t, "model.norm.weight"),
        "error",
        "SW2022",
        "model.norm.weight",
    ),
    "no head": (lambda t: without(t, HEAD), "error", "SW2022", HEAD),
    "torch.compile's names": (prefixed("_orig_mod."), "error", "SW2022", "_orig_mod."),
    "DataParallel's names": (prefixed("module."), "error", "SW2022", "module."),
    "peft's names": (prefixed("base_model.model."), "error", "SW2022", "base_model.model."),
    "an unknown prefix": (prefixed("policy."), "error", "SW2022", "missing from the files"),
    "a padded vocabulary": (padded, "error", "SW2024", f"shape mismatch for {EMBEDDING}"),
    "int8 weights": (
        lambda t: t.update(
            {"model.layers.0.mlp.up_proj.weight": torch.zeros(128, 64, dtype=torch.int8)}
        ),
        "error",
        "SW2025",
        "I8",
    ),
    "GPTQ": (
        lambda t: t.update(
            {"model.layers.0.mlp.up_proj.qweight": torch.zeros(8, 8, dtype=torch.int32)}
        ),
        "error",
        "SW2025",
        "quantized",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_differs_is_named_before_a_rank_starts(name: str, folder: Path) -> None:
    change, severity, code, words = CASES[name]
    rewrite(folder, change)
    told = found(folder)
    assert (severity, code) in {each[:2] for each in told} and words in " ".join(
        each[2] for each in told
    ), told


def test_names_without_the_base_models_prefix_are_loaded(folder: Path) -> None:
    """As transformers adds and takes away `model.` by itself."""
    rewrite(folder, lambda t: {name.removeprefix("model."): tensor for name, tensor in t.items()})
    assert found(folder) == []


def test_a_padded_vocabulary_says_which_vocab_size(folder: Path) -> None:
    rewrite(folder, padded)
    rows = load_file(folder / FILE)[EMBEDDING].shape[0]
    asked = section(folder)
    with pytest.raises(Refusal) as refused:
        compare_weights(asked, build_model_graph(asked))
    assert f"set vocab_size to {rows}" in refused.value.diagnostics[0].help


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_a_head_of_its_own_is_kept_as_transformers_keeps_it(
    stored: torch.dtype, folder: Path
) -> None:
    """tie_word_embeddings: true beside an lm_head.weight that differs."""
    rewrite(folder, lambda t: {name: tensor.to(stored) for name, tensor in t.items()})
    configure(folder, tie_word_embeddings=True)
    graph = build_model_graph(section(folder))
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert graph.tied == () and graph.config["tie_word_embeddings"] is False
    assert sum(p.numel() for p in plain.parameters()) == sum(
        p.numel for layer in graph.layers for p in layer.parameters
    )
    assert [each[:2] for each in found(folder)] == [("warning", "SW2026")]
    document = {key: value for key, value in graph.config.items() if key != "model_type"}
    model = empty_model(AutoConfig.for_model(str(graph.config["model_type"]), **document), None)
    WeightLoader(model, WeightFiles(folder, model), {}, frozenset(), 0).fill([""])
    wanted = dict(plain.named_parameters())
    assert (
        all(torch.equal(wanted[name], p) for name, p in model.named_parameters())
        and len(wanted) > 10
    )


def test_a_head_that_is_the_embedding_stays_tied(folder: Path) -> None:
    """In another type, too: the numbers are compared, not the bytes."""
    rewrite(
        folder,
        lambda t: {**t, EMBEDDING: t[EMBEDDING].bfloat16(), HEAD: t[EMBEDDING].bfloat16().float()},
    )
    configure(folder, tie_word_embeddings=True)
    assert len(build_model_graph(section(folder)).tied) == 1 and found(folder) == []


def test_numbers_are_compared_as_torch_compares_them(tmp_path: Path) -> None:
    nan, zero = torch.tensor([1.0, float("nan")]), torch.tensor([0.0, 2.0])
    tensors = {
        "nan": nan,
        "nan2": nan.clone(),
        "zero": zero,
        "minus": torch.tensor([-0.0, 2.0]),
        "other": zero + 1,
    }
    save_file(tensors, tmp_path / FILE)
    headers = read_headers(tmp_path)
    for a in tensors:
        for b in tensors:
            assert same_values(headers, a, b) == torch.equal(tensors[a], tensors[b])


@pytest.mark.parametrize("model_type", ["llama", "deepseek_v3", "gpt_oss"])
def test_quantised_weights_are_what_transformers_dequantises(
    model_type: str, tmp_path: Path
) -> None:
    config = tiny_config(model_type) | (
        {"intermediate_size": 128} if model_type == "gpt_oss" else {}
    )
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).save_pretrained(tmp_path)
    quantise = quantise_mxfp4 if model_type == "gpt_oss" else quantise_fp8
    assert quantise(tmp_path) > 5
    asked = (
        Mxfp4Config(dequantize=True)
        if model_type == "gpt_oss"
        else FineGrainedFP8Config(dequantize=True, weight_block_size=(16, 16))
    )
    plain = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, quantization_config=asked
    )
    assert [each[:2] for each in found(tmp_path)] == [("note", "SW2025")]
    graph = build_model_graph(section(tmp_path))
    assert "quantization_config" not in graph.config
    model = empty_model(AutoConfig.for_model(**config), None)
    files = WeightFiles(tmp_path, model)
    WeightLoader(model, files, {}, frozenset(), 0).fill([""])
    wanted = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        files.check(name, tuple(parameter.shape))
        assert torch.equal(wanted[name], parameter), name


def test_fp8_blocks_that_transformers_cannot_read_are_refused(folder: Path) -> None:
    quantise_fp8(folder)
    rewrite(folder, lambda t: {k: v[:3] if k.endswith("_scale_inv") else v for k, v in t.items()})
    assert ("error", "SW2022") in {each[:2] for each in found(folder)}


def shards(folder: Path) -> dict[str, Any]:
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="100KB")
    (folder / FILE).unlink()
    index: dict[str, Any] = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    return index


def test_shards_that_contradict_their_index(folder: Path) -> None:
    index = shards(folder)
    path = folder / "model.safetensors.index.json"
    assert found(folder) == []
    path.write_text(json.dumps({**index, "metadata": {"total_size": 7}}))
    assert [each[:2] for each in found(folder)] == [("note", "SW2027")]
    files = sorted(set(index["weight_map"].values()))
    path.write_text(
        json.dumps({**index, "weight_map": {**index["weight_map"], "model.extra.weight": files[0]}})
    )
    assert [each[:2] for each in found(folder)] == [("error", "SW2027")]
    path.write_text(json.dumps(index))
    first, second = (load_file(folder / file) for file in files[:2])
    save_file({**second, **dict(list(first.items())[:1])}, folder / files[1])
    (told,) = found(folder)
    assert told[:2] == ("error", "SW2027") and files[0] in told[2] and files[1] in told[2]


@pytest.mark.parametrize("spoil", ["not finite", "finite"])
def test_weights_that_are_not_finite_are_refused_as_they_are_read(spoil: str, folder: Path) -> None:
    value = float("inf") if spoil == "not finite" else 1e4
    rewrite(
        folder,
        lambda t: {k: torch.full_like(v, value).half() if k == HEAD else v for k, v in t.items()},
    )
    model = empty_model(AutoConfig.for_model(**tiny_config("llama")), None)
    fill = WeightLoader(model, WeightFiles(folder, model), {}, frozenset(), 0).fill
    if spoil == "finite":
        fill([""])
        return
    with pytest.raises(Refusal) as refused:
        fill([""])
    assert (
        refused.value.diagnostics[0].code == "SW6219"
        and HEAD in refused.value.diagnostics[0].message
    )


def quantise_without_a_word(folder: Path) -> None:
    quantise_fp8(folder)
    configure(folder, quantization_config=None)


CHECKED: dict[str, tuple[Callable[[Path], Any], int, str]] = {
    "whole": (lambda folder: None, 0, ""),
    "own head": (lambda folder: configure(folder, tie_word_embeddings=True), 0, "warning[SW2026]"),
    "fp8": (lambda folder: quantise_fp8(folder), 0, "note[SW2025]"),
    "fp8 without a word": (
        quantise_without_a_word,
        1,
        "error[SW2025]",
    ),
    "wrapped": (lambda folder: rewrite(folder, prefixed("_orig_mod.")), 1, "error[SW2022]"),
}


@pytest.mark.parametrize("name", CHECKED)
def test_check_reads_the_headers(
    name: str, folder: Path, write_recipe: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, code, words = CHECKED[name]
    spoil(folder)
    path = write_recipe(
        {"model": {"source": str(folder)}, "data": {"kind": "synthetic"}, "parallelism": {}}
    )
    assert main(["check", str(path)]) == code
    told = capsys.readouterr().err
    assert words in told if words else not told


@pytest.mark.parametrize("name", ["x" * 300 + ".safetensors", "a\0b.safetensors", "none"])
def test_an_index_whose_files_have_no_file_names(name: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"model.norm.weight": name}})
    )
    assert weights_problem(tmp_path).endswith("is missing")

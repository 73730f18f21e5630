"""Initial weights by slices: what transformers loads, and a diagnostic for what cannot be
loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from shardwright.checkpoint.checkpoint_loader import cut
from shardwright.diagnostics import Refusal
from shardwright.layout.parameter_sharding import ParameterSharding
from shardwright.parallel.weight_files import WeightFiles
from shardwright.parallel.weight_loader import LayerSeededWeights, WeightLoader, empty_model
from tests.zoo.configs import build, tiny_config

TYPES = (
    "llama",
    "gpt2",
    "phi3",
    "mixtral",
    "qwen3_moe",
    "deepseek_v3",
    "gpt_oss",
    "bloom",
    "gemma2",
    "gpt_neox",
)


def empty(model_type: str) -> PreTrainedModel:
    return empty_model(AutoConfig.for_model(**tiny_config(model_type)), "eager")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build("llama").save_pretrained(tmp_path / "weights")
    return tmp_path / "weights"


@pytest.mark.parametrize("model_type", TYPES)
def test_the_same_model_as_from_pretrained(model_type: str, tmp_path: Path) -> None:
    build(model_type).save_pretrained(tmp_path, max_shard_size="100KB")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    model = empty(model_type)
    assert all(p.untyped_storage().nbytes() == p.element_size() for p in model.parameters())
    weights = WeightFiles(tmp_path, model)
    WeightLoader(model, weights, {}, frozenset(), 0).fill([""])
    wanted, got = dict(plain.named_parameters()), dict(model.named_parameters())
    assert wanted.keys() == got.keys()
    assert all(torch.equal(wanted[name], got[name]) for name in wanted)
    assert all(
        torch.equal(a, b)
        for (_, a), (_, b) in zip(plain.named_buffers(), model.named_buffers(), strict=True)
    )


def test_parts_of_a_fused_tensor_are_read_into_a_sharded_model(tmp_path: Path) -> None:
    """transformers takes the sizes of the parts from the model, whose shapes are of shards."""
    built = build("sarvam_moe")
    built.save_pretrained(tmp_path)
    model = empty("sarvam_moe")
    weights = WeightFiles(tmp_path, model)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, torch.nn.Parameter(parameter.new_empty(0)))
    stored = {key for key in load_file(tmp_path / "model.safetensors") if "query_key_value" in key}
    assert stored
    for name, wanted in built.named_parameters():
        assert torch.equal(weights.read(name, None), wanted), name


@pytest.mark.parametrize("dimension", [0, 1])
def test_a_rank_reads_its_slices_alone(dimension: int, folder: Path) -> None:
    model = empty("llama")
    weights = WeightFiles(folder, model)
    name = "model.layers.0.self_attn.q_proj.weight"
    shape = tuple(model.get_parameter(name).shape)
    blocks = (shape[dimension],)
    split = ParameterSharding(
        name=name, shape=shape, dimension=dimension, blocks=blocks, sizes=(blocks[0] // 4,) * 4
    )
    WeightLoader(model, weights, {name: split}, frozenset(), 2).fill([name])
    ((start, length),) = split.shard_ranges(2)
    wanted = load_file(folder / "model.safetensors")[name].narrow(dimension, start, length)
    assert torch.equal(cut(split, model.get_parameter(name), 2), wanted)
    assert weights.read_bytes == wanted.numel() * 4


def spoil_truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def spoil_type(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    save_file(tensors, folder / "model.safetensors")


def spoil_shape(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
    save_file(tensors, folder / "model.safetensors")


def spoil_index(folder: Path) -> None:
    (folder / "model.safetensors").unlink()  # from_pretrained prefers it to an index
    (folder / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "gone.safetensors"}}'
    )


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (spoil_truncated, "model.safetensors is missing or incomplete"),
        (spoil_type, "model.norm.weight is of type I8"),
        (spoil_shape, "shape mismatch for model.norm.weight"),
        (spoil_index, "gone.safetensors is missing or incomplete"),
        (
            lambda folder: (folder / "model.safetensors").unlink(),
            "the folder has no safetensors file",
        ),
    ],
)
def test_weights_that_cannot_be_used(spoil: Callable[[Path], None], why: str, folder: Path) -> None:
    spoil(folder)
    model = empty("llama")
    with pytest.raises(Refusal) as refused:
        files = WeightFiles(folder, model)
        for name, parameter in model.named_parameters():
            files.check(name, tuple(parameter.shape))
    assert refused.value.diagnostics[0].code == "SW6211"
    assert why in refused.value.diagnostics[0].message


def test_a_layer_is_drawn_the_same_whoever_draws_it() -> None:
    """Above 10B parameters: in any order, by any rank, and not one layer like another."""
    model = empty("llama")
    stack = "model.layers"
    forward, other = LayerSeededWeights(model, stack, 7), LayerSeededWeights(model, stack, 8)
    names = list(forward.names())
    drawn = {name: forward.read(name, None).clone() for name in names}
    backward = LayerSeededWeights(model, stack, 7)
    assert all(torch.equal(backward.read(name, None), drawn[name]) for name in reversed(names))
    q = "model.layers.{}.self_attn.q_proj.weight"
    assert not torch.equal(drawn[q.format(0)], drawn[q.format(1)])
    assert not torch.equal(other.read(q.format(0), None), drawn[q.format(0)])
    assert torch.equal(drawn["model.norm.weight"], torch.ones_like(drawn["model.norm.weight"]))
    spread = model.config.initializer_range
    assert abs(drawn["model.embed_tokens.weight"].std().item() / spread - 1) < 0.1

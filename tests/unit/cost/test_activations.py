"""Which bytes the cost model counts: the traced ones for the model's own kernels, the published formula for others."""

from __future__ import annotations

import dataclasses

import pytest

from shardwright.cost.activations import activations
from shardwright.ir.model_graph import CHECKPOINTING, kept_entry
from tests.unit.cost.test_estimate import change, estimate
from tests.unit.model.factory import LLAMA_8B, graph_of, recipe_of

LENGTH = 4096


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_the_models_own_kernels_keep_what_was_traced(checkpointing: str) -> None:
    graph = graph_of(LLAMA_8B)
    found = activations(graph, LENGTH, 2, checkpointing, "auto")
    entry = kept_entry(graph.layers[1].kept, checkpointing, 2, LENGTH)
    assert entry is not None
    layers = found.between(1, 33)
    assert (layers.whole, layers.divided) == (32 * entry.whole_bytes(LENGTH), 32 * entry.divided_bytes(LENGTH))
    assert found.between(0, 1).whole == found.between(33, 34).whole == 0  # the lookup keeps nothing, the head is apart
    assert found.head.whole > 0 and found.context.whole > 0


def test_other_kernels_keep_what_is_published() -> None:
    """arXiv 2205.05198, with grouped keys and a gated feed-forward: 6 H + 2 (heads + groups) d + 4 F elements."""
    graph = graph_of(LLAMA_8B)
    attention = 2 * (32 + 8) * 128
    # torch.compile runs cheap operators again: the norms' inputs are kept, and the products' results.
    elements = {"hf": 4 * 4096 + 4 * 14336, "megatron": 4 * 4096 + 4 * 14336, "compiled": 2 * 4096 + 2 * 14336}
    for kernels, others in elements.items():
        layer = activations(graph, LENGTH, 2, "none", kernels).between(1, 2)
        assert layer.whole + layer.divided == 2 * LENGTH * (attention + others)
    assert activations(graph, LENGTH, 2, "none", "megatron").context.whole == 0


def test_a_layer_that_was_not_traced_falls_back_to_the_formula() -> None:
    graph = graph_of(LLAMA_8B)
    untraced = dataclasses.replace(
        graph,
        config_hash="none of it traced",
        layers=tuple(dataclasses.replace(layer, kept=(), flops_source="counted") for layer in graph.layers),
        context=(),
    )
    assert activations(untraced, LENGTH, 2, "none", "auto") == activations(graph, LENGTH, 2, "none", "hf")


def test_tensor_ranks_share_the_divided_part_alone() -> None:
    share = activations(graph_of(LLAMA_8B), LENGTH, 2, "none", "auto").between(1, 2)
    assert share.on_rank(4, sequence_parallel=False) == share.whole + share.divided / 4
    assert share.on_rank(4, sequence_parallel=True) == (share.whole + share.divided) / 4


def test_selective_recomputes_the_attention_module() -> None:
    """Its four projections and both S x S products, once more."""
    plain, again = (estimate(LLAMA_8B, change(activation_checkpointing=m)).time for m in ("none", "selective"))
    extra = (again.hardware_tflops_per_gpu - again.model_tflops_per_gpu) * 1e12 / again.tokens_per_second_per_gpu
    length = recipe_of(LLAMA_8B).training.sequence_length
    assert extra == pytest.approx(32 * (2 * 4096 * (2 * 4096 + 2 * 1024) + 4 * 4096 * length))
    assert again.step_seconds > plain.step_seconds

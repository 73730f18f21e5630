"""Which bytes the cost model counts: the traced ones for the model's own kernels, the published
formula for others."""

from __future__ import annotations

import dataclasses

import pytest

from shardwright.cost.cost_constants import default_constants
from shardwright.cost.layer_shapes import SavedActivations, activations
from shardwright.cost.layer_times import layer_seconds
from shardwright.engines.run_profiles import KernelProfile, kernel_profile
from shardwright.layout.formats import LOW_PRECISION_FORMATS
from shardwright.layout.gpu_cluster import resolve_cluster
from shardwright.models.model_graph import ModelGraph, saved_activations_entry
from shardwright.recipe.literal_types import CHECKPOINTING, Checkpointing
from shardwright.utils.json_values import JsonValue
from tests.unit.cost.test_estimate import change, estimate
from tests.unit.models.factory import LLAMA_8B, SMALL_GPT2, graph_of, recipe_of

LENGTH = 4096
MIXTRAL: dict[str, JsonValue] = {
    "model_type": "mixtral",
    "num_hidden_layers": 2,
    "hidden_size": 1024,
    "head_dim": 64,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 3072,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
}
GPT_OSS: dict[str, JsonValue] = {**MIXTRAL, "model_type": "gpt_oss"}


def saved(
    graph: ModelGraph, length: int, checkpointing: Checkpointing, kernels: str
) -> SavedActivations:
    """Return a sequence's saved activations in bf16; kernels: as in `assume`."""
    profile = kernel_profile(kernels, graph.model_type)
    return activations(graph, length, 2, checkpointing, profile)


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_the_models_own_kernels_keep_what_was_traced(checkpointing: Checkpointing) -> None:
    graph = graph_of(LLAMA_8B)
    found = saved(graph, LENGTH, checkpointing, "auto")
    entry = saved_activations_entry(graph.layers[1].kept, checkpointing, 2, LENGTH)
    assert entry is not None
    layers = found.between(1, 33)
    assert (layers.replicated, layers.sharded) == (
        32 * entry.unsharded_bytes(LENGTH),
        32 * entry.sharded_bytes(LENGTH),
    )
    assert (
        found.between(0, 1).replicated == found.between(33, 34).replicated == 0
    )  # the lookup keeps nothing, the head is apart
    assert found.head.replicated > 0 and found.context.replicated > 0


def test_other_kernels_keep_what_is_published() -> None:
    """arXiv 2205.05198, with grouped keys and a gated feed-forward: 6 H + 2 (heads + groups) d + 4
    F elements."""
    graph = graph_of(LLAMA_8B)
    attention = 2 * (32 + 8) * 128
    # torch.compile runs cheap operators again: the norms' inputs are kept, and the products'
    # results.
    elements = {"megatron": 4 * 4096 + 4 * 14336, "compiled": 2 * 4096 + 2 * 14336}
    for kernels, others in elements.items():
        layer = saved(graph, LENGTH, "none", kernels).between(1, 2)
        assert layer.replicated + layer.sharded == 2 * LENGTH * (attention + others)
    assert saved(graph, LENGTH, "none", "megatron").context.replicated == 0


def test_a_layer_that_was_not_traced_falls_back_to_the_formula() -> None:
    graph = graph_of(LLAMA_8B)
    untraced = dataclasses.replace(
        graph,
        config_hash="none of it traced",
        layers=tuple(
            dataclasses.replace(layer, kept=(), flops_source="counted") for layer in graph.layers
        ),
        context=(),
    )
    assert saved(untraced, LENGTH, "none", "auto") == saved(graph, LENGTH, "none", "megatron")


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_hf_is_the_models_own_modules_but_for_a_gpt2(checkpointing: Checkpointing) -> None:
    llama, gpt2 = graph_of(LLAMA_8B), graph_of({**SMALL_GPT2, "resid_pdrop": 0.1})
    assert saved(llama, LENGTH, checkpointing, "hf") == saved(llama, LENGTH, checkpointing, "auto")
    # MPT: both norms in and out, queries, keys, values and output, 8 H of the feed-forward, and no
    # dropout masks.
    layer = saved(gpt2, 128, checkpointing, "hf").between(1, 2)
    assert layer.replicated + layer.sharded == 128 * 2 * 64 * (16 if checkpointing == "none" else 1)


def test_selective_by_operator_keeps_every_second_product() -> None:
    """torchtitan's: the layer's input, queries, values, the gate, attention's output; in eager mode
    the last product's result too, which no backward pass reads."""
    graph = graph_of(LLAMA_8B)
    kept = 4096 + 4096 + 1024 + 14336 + 4096
    for kernels, elements in (("compiled", kept), ("hf", kept + 4096)):
        layer = saved(graph, LENGTH, "selective", kernels).between(1, 2)
        assert layer.replicated + layer.sharded == 2 * LENGTH * elements


def test_tensor_ranks_share_the_divided_part_alone() -> None:
    share = saved(graph_of(LLAMA_8B), LENGTH, "none", "auto").between(1, 2)
    assert share.on_rank(4, sequence_parallel=False) == share.replicated + share.sharded / 4
    assert share.on_rank(4, sequence_parallel=True) == (share.replicated + share.sharded) / 4


def test_selective_recomputes_the_attention_module() -> None:
    """Its four projections and both S x S products, once more."""
    plain, recompute = (
        estimate(LLAMA_8B, change(activation_checkpointing=m)).time for m in ("none", "selective")
    )
    extra = (
        (recompute.hardware_tflops_per_gpu - recompute.model_tflops_per_gpu)
        * 1e12
        / recompute.tokens_per_second_per_gpu
    )
    length = recipe_of(LLAMA_8B).training.sequence_length
    assert extra == pytest.approx(32 * (2 * 4096 * (2 * 4096 + 2 * 1024) + 4 * 4096 * length))
    assert recompute.step_seconds > plain.step_seconds


def test_selective_by_operator_recomputes_the_other_products() -> None:
    """Keys, attention's output projection and the second product of the feed-forward; no scores."""
    recipe = recipe_of(LLAMA_8B, assume={"kernels": "compiled"})
    time = estimate(LLAMA_8B, change(activation_checkpointing="selective"), recipe=recipe).time
    extra = (
        (time.hardware_tflops_per_gpu - time.model_tflops_per_gpu)
        * 1e12
        / time.tokens_per_second_per_gpu
    )
    assert extra == pytest.approx(32 * 2 * (4096 * 1024 + 4096 * 4096 + 4096 * 14336))


def test_recomputation_leaves_out_the_last_product() -> None:
    """Full checkpointing repeats all but the product that ends the layer, except where a dropout's
    mask follows it."""

    def again_over_forward(dropout: float) -> float:
        config = {
            **SMALL_GPT2,
            "n_embd": 4096,
            "n_inner": 16384,
            "n_positions": 4096,
            "resid_pdrop": dropout,
        }
        recipe = recipe_of(config, training={"sequence_length": 4096})
        seconds = layer_seconds(
            recipe,
            graph_of(config),
            resolve_cluster(recipe.cluster).gpu,
            change(activation_checkpointing="full"),
            default_constants(),
        )
        return (seconds.recompute[2] - seconds.recompute[1]) / (
            seconds.forward[2] - seconds.forward[1]
        )

    assert again_over_forward(0.1) == 1
    assert 0.6 < again_over_forward(0.0) < 0.8  # a third of the products' FLOPs, less of the time


def test_megatrons_kernels_on_one_data_rank_are_megatron_lm() -> None:
    """Its runs without ZeRO pay none of DeepSpeed's cost of a collective, whatever `target`
    says."""
    recipe = recipe_of(LLAMA_8B, assume={"kernels": "megatron"})
    seconds = {
        zero_stage: estimate(
            LLAMA_8B, change(tensor=8, data=1, zero_stage=zero_stage), recipe=recipe
        ).time.tensor_comm_seconds
        for zero_stage in (0, 1)
    }
    reductions = 4 * 32 + 2  # each micro-batch
    host = 4 * reductions * default_constants().collective_host_seconds
    assert seconds[1] - seconds[0] == pytest.approx(host, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "size"), [(n, row.input_bytes) for n, row in LOW_PRECISION_FORMATS.items()]
)
def test_low_precision_saves_linear_inputs_in_its_format(name: str, size: float) -> None:
    """Count by hand: both norms' outputs and the activated features shrink; attention's output is
    saved once more, unless core attention is recomputed."""
    graph = graph_of(LLAMA_8B)
    fewer, hidden, features = size - 2, 4096, 14336
    for mode, attention in (("none", size), ("selective", fewer)):
        before, after = (
            activations(
                graph, LENGTH, 2, mode, kernel_profile("megatron", "llama"), linear_input_bytes=each
            ).between(1, 2)
            for each in (None, size)
        )
        assert after.replicated - before.replicated == pytest.approx(2 * fewer * hidden * LENGTH)
        assert after.sharded - before.sharded == pytest.approx(
            (fewer * features + attention * hidden) * LENGTH
        ), name


def test_low_precision_saves_the_experts_rows_in_its_format() -> None:
    graph = graph_of(MIXTRAL)
    before, after = (
        activations(
            graph, LENGTH, 2, "none", kernel_profile("megatron", "mixtral"), linear_input_bytes=each
        ).between(1, 2)
        for each in (None, 1.0)
    )
    hidden, features, chosen = 1024, 3072, 2  # heads times their size is the hidden size
    # The router reads the norm's output in bf16.
    assert after.replicated - before.replicated == -hidden * LENGTH
    assert after.sharded - before.sharded == (hidden - chosen * (hidden + features)) * LENGTH


def test_fused_attention_sinks_save_no_scores() -> None:
    """Scores grow with the square of the length, all else with the length."""
    graph = graph_of(GPT_OSS)

    def per_token(profile: KernelProfile, length: int) -> float:
        share = activations(graph, length, 2, "none", profile).between(1, 2)
        return (share.replicated + share.sharded) / length

    eager = kernel_profile("auto", "gpt_oss")
    fused = dataclasses.replace(eager, fuses_attention_sinks=True)
    assert per_token(eager, 8192) > 1.5 * per_token(eager, 4096)
    assert per_token(fused, 8192) == pytest.approx(per_token(fused, 4096), rel=0.01)

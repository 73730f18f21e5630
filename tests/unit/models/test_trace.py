"""Traced FLOPs and kept bytes against torch's own counters, which run on the whole plain model."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from shardwright.models.graph_builder import build_model_graph
from shardwright.models.model_graph import ModelGraph, SavedActivations, saved_activations_entry
from shardwright.parallel.layer_compile_and_recompute import checkpoint_layers
from shardwright.recipe.literal_types import CHECKPOINTING, Checkpointing
from shardwright.utils.json_values import JsonValue
from tests.unit.models.factory import SMALL_LLAMA, graph_of, model_section

WIDE: dict[str, JsonValue] = {
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
}
NO_GROUPS = {name: value for name, value in WIDE.items() if name != "num_key_value_heads"}
NO_DROPOUT: dict[str, JsonValue] = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
FAMILIES: dict[str, dict[str, JsonValue]] = {
    "llama": {"model_type": "llama", **WIDE},
    "mistral": {"model_type": "mistral", **WIDE},
    "mistral-window": {"model_type": "mistral", **WIDE, "sliding_window": 300},
    "qwen2": {"model_type": "qwen2", **WIDE},
    "qwen3": {"model_type": "qwen3", **WIDE, "head_dim": 96},
    "phi3": {"model_type": "phi3", **WIDE},
    "gemma2": {"model_type": "gemma2", **WIDE, "head_dim": 64, "sliding_window": 300},
    "gpt_neox": {
        "model_type": "gpt_neox",
        **NO_GROUPS,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    },
    "mixtral": {"model_type": "mixtral", **WIDE, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"model_type": "qwen3_moe", **WIDE, "num_experts": 8, "num_experts_per_tok": 3},
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 384,
        "n_layer": 3,
        "n_head": 6,
        "vocab_size": 512,
        **NO_DROPOUT,
    },
    "opt": {
        "model_type": "opt",
        "hidden_size": 384,
        "ffn_dim": 1024,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "vocab_size": 512,
        "word_embed_proj_dim": 384,
        "dropout": 0.0,
    },
    "bloom": {
        "model_type": "bloom",
        "hidden_size": 384,
        "n_layer": 3,
        "n_head": 6,
        "vocab_size": 512,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    },
}
LENGTH = 512
SAMPLE = ("llama", "mixtral")
ELEMENT_BYTES = {torch.bfloat16: 2, torch.float32: 4}


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def attentions(config: dict[str, JsonValue]) -> tuple[str, ...]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    return ("eager", "sdpa") if model._supports_sdpa else ("eager",)


def plain_model(
    config: dict[str, JsonValue], attention: str, dtype: torch.dtype
) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config), dtype=dtype, attn_implementation=attention
    )
    return model.train()


# torch's counter has no formula for the CPU's own kernels; these are its own of the GPU's.
def _forward(
    query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    return int(sdpa_flop_count(query, key, value))


def _backward(
    grad: Any, query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    return int(sdpa_backward_flop_count(grad, query, key, value))


def _grouped(a: Any, b: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """(rows, k) x (experts, k, n), or its weights' gradient (k, rows) x (rows, n): each row meets
    one matrix."""
    return 2 * int(a[-2] * a[-1] * b[-1])


KERNELS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _forward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward,
    torch.ops.aten._grouped_mm: _grouped,
}


def flops(graph: ModelGraph, length: int) -> tuple[int, int]:
    """Forward and backward FLOPs of one sequence."""
    forward = sum(
        (x.matmul_flops_per_token + x.attention_flops_per_token_per_position * length) * length
        for x in graph.layers
    )
    backward = sum(
        (x.backward_flops_per_token + x.backward_flops_per_token_per_position * length) * length
        for x in graph.layers
    )
    return forward, backward


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in SAMPLE else pytest.mark.prove) for n in FAMILIES],
)
def test_flops_are_those_that_torch_counts_on_the_whole_model(name: str) -> None:
    config = FAMILIES[name]
    for attention in attentions(config):
        graph = build_model_graph(model_section(config, attention=attention))
        assert {layer.flops_source for layer in graph.layers} == {"traced"}
        model = plain_model(config, attention, torch.float32)
        assert graph.total_parameters == sum(p.numel() for p in model.parameters())
        for length in (96, 320):
            with FlopCounterMode(display=False, custom_mapping=KERNELS) as counter:
                logits = model(input_ids=torch.randint(3, 500, (1, length)), use_cache=False).logits
                forward = counter.get_total_flops()
                logits.sum().backward()
            backward = counter.get_total_flops() - forward
            assert flops(graph, length) == pytest.approx((forward, backward), rel=0.01), (
                attention,
                length,
            )


def kept_bytes(
    graph: ModelGraph, checkpointing: Checkpointing, element_bytes: int, length: int
) -> int:
    """Of the whole model, what all layers are handed included."""

    def size(entries: tuple[SavedActivations, ...], mode: Checkpointing) -> int:
        entry = saved_activations_entry(entries, mode, element_bytes, length)
        assert entry is not None
        return entry.unsharded_bytes(length) + entry.sharded_bytes(length)

    # The embedding and the head are never recomputed.
    layers = sum(
        size(x.kept, checkpointing if x.kind == "decoder" else "none") for x in graph.layers
    )
    return layers + size(graph.context, "none")


def tracked_bytes(
    config: dict[str, JsonValue],
    graph: ModelGraph,
    checkpointing: Checkpointing,
    dtype: torch.dtype,
    length: int,
) -> int:
    """What the forward pass of the plain model has allocated and not freed before backward, without
    the logits.

    Parameters and hidden states are fake; masks and positions are real, as on a GPU: on fake ones
    Hugging Face cannot see that a causal mask is not needed. Fake experts have bfloat16 kernels
    alone, so those in float32 are real.
    """
    real = dtype == torch.float32 and any(
        ".experts" in p.name for x in graph.layers for p in x.parameters
    )
    with nullcontext() if real else FakeTensorMode(allow_non_fake_inputs=True):
        model = plain_model(config, graph.attention, dtype)
    stack: nn.Module = model.get_submodule(graph.cut.stack)
    checkpoint_layers(list(stack.children()), checkpointing, graph.attention_module)
    ids = torch.zeros(1, length, dtype=torch.long)
    tracker = MemTracker()
    tracker.track_external(model, ids)
    with tracker:
        logits = model(input_ids=ids, use_cache=False).logits
        activations = tracker.get_tracker_snapshot("current")[torch.device("cpu")][_MemRefType.ACT]
    return int(activations) - int(logits.untyped_storage().nbytes())


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in SAMPLE else pytest.mark.prove) for n in FAMILIES],
)
def test_kept_bytes_are_those_that_the_memory_tracker_sees(name: str) -> None:
    """Not a length that was traced (128, 256); beyond the window of the types that have one."""
    config = FAMILIES[name]
    wrong = []
    for attention in attentions(config):
        graph = build_model_graph(model_section(config, attention=attention))
        for checkpointing, dtype in itertools.product(CHECKPOINTING, ELEMENT_BYTES):
            ours = kept_bytes(graph, checkpointing, ELEMENT_BYTES[dtype], LENGTH)
            theirs = tracked_bytes(config, graph, checkpointing, dtype, LENGTH)
            if ours != pytest.approx(theirs, rel=0.05):
                wrong.append(
                    (
                        attention,
                        checkpointing,
                        str(dtype),
                        ours,
                        theirs,
                        round(ours / theirs - 1, 3),
                    )
                )
    assert not wrong


def test_the_fit_holds_at_other_lengths() -> None:
    """On both sides of a window that is longer than what is traced. Ours counts the shared mask,
    freed in the end."""
    window = {**FAMILIES["mistral-window"], "sliding_window": 700}
    graph = build_model_graph(model_section(window, attention="sdpa"))
    for length in (640, 768):
        ours = kept_bytes(graph, "none", 2, length)
        assert ours == pytest.approx(
            tracked_bytes(window, graph, "none", torch.bfloat16, length), rel=0.02
        ), length


def test_dropout_keeps_a_byte_an_element_as_a_gpu_does() -> None:
    config: dict[str, JsonValue] = {
        "model_type": "gpt2",
        "n_embd": 64,
        "n_layer": 1,
        "n_head": 4,
        "vocab_size": 64,
    }
    plain, dropping = graph_of({**config, **NO_DROPOUT}), graph_of(config)
    length = 256
    more = kept_bytes(dropping, "none", 2, length) - kept_bytes(plain, "none", 2, length)
    assert (
        more == 3 * length * 64
    )  # behind the embedding, the attention and the feed-forward; fused attention has none


def test_what_tensor_parallelism_divides() -> None:
    """Llama in bfloat16, per token. Whole: of each norm a float32 copy of the input, its normalised
    form and output, and the inverse root mean square in float32. Divided: Q, K, V and the
    attention's output (2 bytes each, and the log-sum-exp of 4), and four tensors as wide as the
    feed-forward."""
    graph = graph_of(SMALL_LLAMA)
    entry = saved_activations_entry(graph.layers[1].kept, "none", 2, 1024)
    assert (
        entry is not None
        and not entry.unsharded_bytes_per_token_pair
        and not entry.sharded_bytes_per_token_pair
    )
    assert entry.unsharded_bytes_per_token == 2 * (64 * (4 + 2 + 2) + 4)
    assert entry.sharded_bytes_per_token == 2 * (64 + 32 + 32 + 64) + 4 * 8 + 4 * 2 * 128


def test_equal_layers_are_traced_once_and_405b_in_seconds() -> None:
    """A fresh process, the import of transformers included. 8 s is the promise on a machine that
    does nothing else."""
    code = (
        "from shardwright.models.graph_builder import build_model_graph\n"
        "from tests.unit.models.factory import LLAMA_405B, model_section\n"
        "graph = build_model_graph(model_section(LLAMA_405B))\n"
        "assert {layer.flops_source for layer in graph.layers} == {'traced'}\n"
        "print(graph.total_parameters)"
    )
    began = os.times()
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    ended = os.times()
    assert done.stdout.strip() == "405853388800", done.stderr[-2000:]
    # Processor time: the tests share their machine.
    used = ended.children_user - began.children_user + ended.children_system - began.children_system
    assert used < 20  # of 126 layers one is traced; a slow core takes ten seconds

"""`training.low_precision`: SW3185 to SW3190 and SW3193, and the linears that it converts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from shardwright.layout.gpu_cluster import resolve_cluster
from shardwright.layout.layout import Layout
from shardwright.layout.low_precision_modules import (
    low_precision_experts,
    low_precision_modules,
    low_precision_shares,
)
from shardwright.layout.planning_problem import Problem
from shardwright.models.model_graph import ModelGraph
from shardwright.recipe.literal_types import Kernels
from shardwright.recipe.recipe_types import LoraSection, Recipe, with_resolved_kernels
from shardwright.search.rule_registry import check_layout
from tests.unit.models.factory import SMALL_LLAMA, graph_of, recipe_of
from tests.unit.search.test_layout_rules import change

PLAIN = change(tensor=1, pipeline=2, data=4, gradient_accumulation_steps=4)


def low(
    name: str,
    *keep: str,
    gpu: str | None = None,
    kernels: Kernels = "compile",
    **training: Any,
) -> Recipe:
    recipe = recipe_of(
        cluster={} if gpu is None else {"gpu": gpu},
        training={"low_precision": name, "low_precision_keep": keep, **training},
    )
    return with_resolved_kernels(recipe, kernels)


def found(recipe: Recipe, layout: Layout = PLAIN, graph: ModelGraph | None = None) -> set[str]:
    problem = Problem(
        recipe=recipe,
        graph=graph or graph_of(SMALL_LLAMA),
        cluster=resolve_cluster(recipe.cluster),
    )
    codes = {d.code for d in check_layout(problem, layout)}
    return codes & {f"SW31{number}" for number in (*range(85, 91), 93)}


def test_the_gpu_needs_a_peak() -> None:
    assert found(low("fp8_rowwise", gpu="h100-sxm-80gb")) == set()
    assert found(low("fp8_rowwise", gpu="a100-sxm4-80gb")) == {"SW3185"}
    assert found(low("nvfp4", gpu="h100-sxm-80gb")) == {"SW3185", "SW3190"}
    assert found(low("nvfp4", gpu="b200-sxm-180gb")) == {"SW3190"}
    assert found(low("none", gpu="a100-sxm4-80gb")) == set()


def test_what_was_not_compared() -> None:
    lora = LoraSection(rank=4, alpha=8, dropout=0.0, target_modules=None)
    recipe = low("fp8_rowwise", gpu="h100-sxm-80gb")
    assert found(dataclasses.replace(recipe, lora=lora)) == {"SW3186"}
    assert found(low("fp8_rowwise", gpu="h100-sxm-80gb", precision="fp16")) == {"SW3186"}
    assert found(low("fp8_rowwise", gpu="cpu", precision="fp32")) == set()


def test_kept_names_exist_and_leave_something() -> None:
    assert found(low("fp8_rowwise", "o_proj", "model.layers.0", gpu="h100-sxm-80gb")) == set()
    assert found(low("fp8_rowwise", "oproj", gpu="h100-sxm-80gb")) == {"SW3187"}
    assert found(low("fp8_rowwise", "lm_head", gpu="h100-sxm-80gb")) == {"SW3187"}
    assert found(low("fp8_rowwise", "model.layers.*", gpu="h100-sxm-80gb")) == {"SW3188"}


def test_tensor_ranks_keep_the_kernels_widths() -> None:
    graph = graph_of({**SMALL_LLAMA, "intermediate_size": 16 * 11})
    cut = change(tensor=2, pipeline=1, data=4, gradient_accumulation_steps=4)
    assert found(low("fp8_rowwise", gpu="h100-sxm-80gb"), cut, graph) == {"SW3189"}
    assert found(low("fp8_rowwise", "*.mlp", gpu="h100-sxm-80gb"), cut, graph) == set()
    assert found(low("fp8_rowwise", gpu="cpu"), cut, graph) == set()  # emulated


@pytest.mark.parametrize("name", ["fp8_tensorwise", "nvfp4"])
def test_scales_of_a_rank_depend_on_the_layout(name: str) -> None:
    assert "SW3190" in found(low(name, gpu="b200-sxm-180gb"))


def test_casts_without_compile_are_warned_of() -> None:
    assert found(low("fp8_rowwise", gpu="h100-sxm-80gb", kernels="hf")) == {"SW3193"}
    assert found(low("none", gpu="h100-sxm-80gb", kernels="hf")) == set()
    assert found(low("fp8_rowwise", gpu="cpu", kernels="hf")) == set()  # emulated
    assert "SW3193" not in found(low("nvfp4", gpu="b200-sxm-180gb", kernels="hf"))  # priced only


def test_linears_are_converted_and_routers_and_experts_are_not() -> None:
    graph = graph_of({**SMALL_LLAMA, "model_type": "mixtral", "num_local_experts": 4})
    paths = low_precision_modules(graph, low("fp8_rowwise").training, is_emulated=False)
    names = {path.rpartition(".")[2] for path in paths}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_stacks_of_experts_of_the_layers_with_converted_linears() -> None:
    graph = graph_of({**SMALL_LLAMA, "model_type": "mixtral", "num_local_experts": 4})
    training = low("mxfp8", "model.layers.0").training
    paths = low_precision_modules(graph, training, is_emulated=False)
    assert low_precision_experts(graph, paths) == tuple(
        f"model.layers.{layer}.mlp.experts.{name}"
        for layer in range(1, len(graph.layers) - 2)
        for name in ("gate_up_proj", "down_proj")
    )
    assert low_precision_experts(graph, ()) == ()


def test_odd_widths_are_left_alone_but_where_they_are_emulated() -> None:
    graph = graph_of({**SMALL_LLAMA, "intermediate_size": 100})
    training = low("fp8_rowwise").training
    on_gpu, on_cpu = (
        low_precision_modules(graph, training, is_emulated=each) for each in (False, True)
    )
    assert {p for p in on_cpu if p not in on_gpu} == {p for p in on_cpu if ".mlp." in p}


def test_shares_of_layers() -> None:
    graph = graph_of({**SMALL_LLAMA, "num_hidden_layers": 4})
    training = low("fp8_rowwise", "model.layers.0", "v_proj").training
    shares = low_precision_shares(graph, training, is_emulated=True)
    assert shares["self_attn.q_proj"] == 0.75 and shares["self_attn.v_proj"] == 0.0

"""Compare the matrices of each fused weight with what the model computes from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from shardwright.layout.fused_weights import (
    FUSED_WEIGHTS,
    TRANSPOSED_EXPERTS,
    FusedOrder,
    JoinedMatrices,
    joined_matrices,
)
from shardwright.models.graph_builder import build_model_graph
from shardwright.models.model_graph import ModelGraph
from tests.unit.models.factory import recipe_of
from tests.zoo.configs import inputs, randomize, tiny_config

LENGTH, PLACE = 8, 3
"""Tokens, and the position whose features are changed."""

UNCLIPPED = {**tiny_config("dbrx")["attn_config"], "clip_qkv": 100.0}
OLD_FALCON = {"new_decoder_architecture": False, "num_ln_in_parallel_attn": None}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{model_type: (model_type, {}) for model_type in FUSED_WEIGHTS},
    "dbrx": ("dbrx", {"attn_config": UNCLIPPED}),
    "falcon-by-head": ("falcon", {**OLD_FALCON, "multi_query": False, "num_kv_heads": 4}),
    "falcon-multi-query": ("falcon", {**OLD_FALCON, "multi_query": True}),
    "gpt-bigcode-by-head": ("gpt_bigcode", {"multi_query": False}),
}


SAMPLE = ("dbrx", "falcon-by-head", "gpt_oss", "phi3")
"""What runs without `make prove`: blocks by head, joined experts, joined projections."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in SAMPLE else pytest.mark.prove) for n in CASES]
)
def test_each_matrix_is_the_models(name: str) -> None:
    model_type, changes = CASES[name]
    config = {**tiny_config(model_type), **changes}
    graph = build_model_graph(recipe_of(config).model)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config), dtype=torch.float64, experts_implementation="eager"
    )
    randomize(model, 0)
    model.eval()
    fused = fused_parameters(graph)
    assert {leaf(p) for p in fused} == set(FUSED_WEIGHTS[model_type])
    for parameter, joined in fused.items():
        if len(joined.rows) == 3:
            check_attention(model_type, model, parameter, joined)
        else:
            check_feed_forward(model_type, model, parameter, joined)


def fused_parameters(graph: ModelGraph) -> dict[str, JoinedMatrices]:
    """The last layer's fused weights of the table, by name."""
    found: dict[str, tuple[str, JoinedMatrices]] = {}
    for layer in graph.layers:
        for p in layer.parameters if layer.kind == "decoder" else ():
            if leaf(p.name) in FUSED_WEIGHTS[graph.model_type] and len(p.shape) > 1:
                joined = joined_matrices(graph, p)
                assert joined is not None
                found[leaf(p.name)] = (p.name, joined)
    return dict(found.values())


def leaf(parameter: str) -> str:
    return parameter.removesuffix(".weight").rpartition(".")[2]


def matrix_of_each_row(joined: JoinedMatrices) -> torch.Tensor:
    """The number of the matrix of each row, written from the description of a group."""
    groups = joined.order.groups
    one = [number for number, rows in enumerate(joined.rows) for _ in range(rows // groups)]
    return torch.tensor(one * groups)


def first_tensor(output: Any) -> torch.Tensor:
    found: torch.Tensor = output if isinstance(output, torch.Tensor) else output[0]
    return found


@torch.no_grad()
def check_attention(
    model_type: str, model: nn.Module, parameter: str, joined: JoinedMatrices
) -> None:
    """A query of a token changes that token's output alone, keys and values later ones too; where
    the values are 0 nothing but a value changes anything."""
    module = parameter.removesuffix(".weight")
    linear = model.get_submodule(module)
    owner = model.get_submodule(module.rpartition(".")[0])
    which = matrix_of_each_row(joined)
    if model_type == "codegen":  # it holds the values before the keys
        which = torch.tensor([0, 2, 1])[which]
    rows = len(which)
    ids = torch.randint(3, 250, (1, LENGTH)).expand(rows + 1, -1)
    arguments = {k: v for k, v in inputs(model_type, ids).items() if k != "labels"}

    def difference(values: float) -> torch.Tensor:
        """(row, position): the largest change of the attention's output."""

        def change(_: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
            changed = output.clone()
            changed[..., which == 2] *= values
            for row in range(rows):
                changed[row, PLACE, row] += 0.5
            return changed

        found: list[torch.Tensor] = []
        hooks = [
            linear.register_forward_hook(change),
            owner.register_forward_hook(lambda *call: found.append(first_tensor(call[2]))),
        ]
        model(**arguments)
        for hook in hooks:
            hook.remove()
        return (found[0][:rows] - found[0][rows:]).abs().amax(-1) > 1e-10

    changed = difference(1.0)
    assert not changed[:, :PLACE].any()
    assert changed[which == 0, PLACE].all() and not changed[which == 0, PLACE + 1 :].any()
    assert changed[which > 0, PLACE + 1].all()
    silent = difference(0.0)
    assert not silent[which < 2].any()
    assert silent[which == 2, PLACE].all()


@torch.no_grad()
def check_feed_forward(
    model_type: str, model: nn.Module, parameter: str, joined: JoinedMatrices
) -> None:
    """The output is affine in a row of up and curved in a row of gate."""
    weight = model.get_parameter(parameter)
    owner = model.get_submodule(parameter.removesuffix(".weight").rpartition(".")[0])
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append((args, kwargs))

    hook = owner.register_forward_pre_hook(record, with_kwargs=True)
    model(**inputs(model_type, torch.randint(3, 250, (2, LENGTH))))
    hook.remove()
    args, kwargs = calls[0]
    which = matrix_of_each_row(joined)
    row_dimension = weight.ndim - (1 if joined.order.is_transposed else 2)
    assert weight.shape[row_dimension] == len(which)
    for row, matrix in enumerate(which.tolist()):
        own = weight.select(row_dimension, row)
        plain, direction, outputs = own.clone(), 0.1 * torch.randn_like(own), []
        for factor in (0, 1, 2):
            own.copy_(plain + factor * direction)
            outputs.append(first_tensor(owner(*args, **kwargs)))
        own.copy_(plain)
        base, once, twice = outputs
        assert not torch.equal(base, once)
        curvature = float((twice - 2 * once + base).abs().max() / (once - base).abs().max())
        assert (curvature < 1e-9) == (matrix == 1), (parameter, row, curvature)


@pytest.mark.parametrize("model_type", TRANSPOSED_EXPERTS)
def test_transposed_experts_end_in_inputs_and_outputs(model_type: str) -> None:
    config = tiny_config(model_type)
    graph = build_model_graph(recipe_of(config).model)
    every = [p for layer in graph.layers for p in layer.parameters]
    down = [p for p in every if p.name.endswith("experts.down_proj")]
    assert {p.shape[-1] for p in down} == {graph.hidden_size}
    assert all(
        joined_matrices(graph, p) == JoinedMatrices(order=FusedOrder(is_transposed=True))
        for p in down
    )

"""What context ranks do not run, each with a code and a way out."""

from __future__ import annotations

import pytest

from shardwright.diagnostics import Diagnostic
from shardwright.layout.gpu_cluster import resolve_cluster
from shardwright.layout.planning_problem import Problem
from shardwright.models.graph_builder import build_model_graph
from shardwright.models.model_probe import context_parallel_blocker
from shardwright.search.rule_registry import check_layout
from shardwright.utils.json_values import JsonValue
from tests.unit.models.factory import SMALL_GPT2, SMALL_LLAMA, graph_of, recipe_of
from tests.unit.search.test_layout_rules import change

ONE_CONVOLUTION: dict[str, JsonValue] = {
    "model_type": "lfm2",
    "num_hidden_layers": 16,
    "layer_types": [*["full_attention"] * 9, "conv", *["full_attention"] * 6],
}
TWO = change(context=2, data=1, gradient_accumulation_steps=16)


def errors(
    config: dict[str, JsonValue],
    strategy: object = TWO,
    training: dict[str, object] | None = None,
    **sections: object,
) -> dict[str, Diagnostic]:
    recipe = recipe_of(config, training=training or {}, **sections)  # type: ignore[arg-type]
    graph = build_model_graph(recipe.model)
    problem = Problem(recipe=recipe, graph=graph, cluster=resolve_cluster(recipe.cluster))
    return {d.code: d for d in check_layout(problem, strategy) if d.severity == "error"}  # type: ignore[arg-type]


def test_a_llama_runs() -> None:
    assert not errors(SMALL_LLAMA)


def test_the_row_divides() -> None:
    found = errors(SMALL_LLAMA, training={"sequence_length": 33})["SW3141"]
    assert tuple(map(int, found.valid)) == (32, 34)


def test_heads_divide() -> None:
    """Eight heads, four of them on each tensor rank."""
    shared = change(context=8, tensor=2, pipeline=1, data=1, gradient_accumulation_steps=16)
    assert "SW3142" in errors(SMALL_LLAMA, shared)
    alone = change(context=8, tensor=1, pipeline=1, data=1, gradient_accumulation_steps=16)
    assert "SW3142" not in errors(SMALL_LLAMA, alone)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "bloom"}, "attention interface"),
        ({"model_type": "mamba"}, "attention interface"),
        (ONE_CONVOLUTION, "outside of attention"),
    ],
)
def test_types_that_look_beyond_a_token_are_refused(config: dict[str, JsonValue], why: str) -> None:
    found = errors(config)["SW3143"]
    assert why in found.message and config["model_type"] in found.message  # type: ignore[operator]
    assert not any(code == "SW3143" for code in errors(config, change()))


def test_dropout_is_not_proved() -> None:
    dropped: dict[str, JsonValue] = {**SMALL_GPT2, "resid_pdrop": 0.1}
    assert "dropout 0.1" in errors(dropped)["SW3144"].message
    still = {**SMALL_GPT2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    assert "SW3144" not in errors(still)


def test_the_answer_is_of_the_configuration_at_hand() -> None:
    assert context_parallel_blocker(graph_of(SMALL_LLAMA)) == ""

"""What expert ranks do not run, each with a code and a way out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.layout.gpu_cluster import resolve_cluster
from shardwright.layout.planning_problem import Problem
from shardwright.models.expert_modules import expert_modules
from shardwright.models.graph_builder import build_model_graph
from shardwright.recipe.recipe_types import LoraSection
from shardwright.search.rule_registry import check_layout
from shardwright.utils.json_values import JsonValue
from tests.unit.models.factory import SMALL_LLAMA, graph_of, model_section, recipe_of
from tests.unit.search.test_context_rules import errors
from tests.unit.search.test_layout_rules import change
from tests.zoo.configs import tiny_config

MIXTURE: dict[str, JsonValue] = {
    **SMALL_LLAMA,
    "model_type": "mixtral",
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
}
TWO = change(tensor=1, pipeline=2, data=4, expert=2, gradient_accumulation_steps=4)


def test_a_mixture_runs() -> None:
    assert not errors(MIXTURE, TWO)
    assert set(expert_modules(graph_of(MIXTURE)).values()) == {6}


@pytest.mark.parametrize("model_type", ["inkling_text", "granitemoehybrid", "nemotron_h"])
def test_mixtures_beside_other_things_run(model_type: str) -> None:
    """Shared experts that are a stack of their own, and infinite numbers in the configuration."""
    config = tiny_config(model_type)
    two = change(tensor=1, pipeline=1, data=4, expert=2, gradient_accumulation_steps=4)
    assert not [code for code in errors(config, two) if code in ("SW3146", "SW3147")]
    assert set(expert_modules(build_model_graph(model_section(config))).values()) == {4}


def test_expert_ranks_are_data_ranks() -> None:
    found = errors(
        MIXTURE, change(tensor=1, pipeline=2, data=4, expert=3, gradient_accumulation_steps=4)
    )
    assert "data 4 x context 1" in found["SW3145"].message and set(found["SW3145"].valid) <= {
        "1",
        "2",
        "4",
    }
    shared = change(
        tensor=1, pipeline=2, data=1, context=4, expert=2, gradient_accumulation_steps=16
    )
    assert "SW3145" not in errors(MIXTURE, shared)


def test_experts_divide() -> None:
    found = errors(
        MIXTURE, change(tensor=1, pipeline=2, data=4, expert=4, gradient_accumulation_steps=4)
    )["SW3146"]
    assert "6 experts" in found.message and set(found.valid) <= {"1", "2", "3", "6"}


@pytest.mark.parametrize(
    "config",
    [SMALL_LLAMA, *(tiny_config(name) for name in ("llama4_text", "jetmoe", "longcat_flash"))],
    ids=lambda config: config["model_type"],
)
def test_types_without_the_interface_are_refused_by_name(config: dict[str, JsonValue]) -> None:
    assert repr(config["model_type"]) in errors(config, TWO)["SW3147"].message


def test_what_is_not_proved_beside_them() -> None:
    dropped: dict[str, JsonValue] = {**MIXTURE, "attention_dropout": 0.1}
    assert "dropout 0.1" in errors(dropped, TWO)["SW3148"].message
    adapted = replace(
        recipe_of(MIXTURE),
        lora=LoraSection(rank=4, alpha=8.0, dropout=0.0, target_modules=("q_proj",)),
    )
    problem = Problem(
        recipe=adapted, graph=graph_of(MIXTURE), cluster=resolve_cluster(adapted.cluster)
    )
    assert "SW3149" in {d.code for d in check_layout(problem, change(**FLAT))}
    assert "SW3150" in errors(MIXTURE, change(**{**FLAT, "zero_stage": 0}))
    assert not errors(MIXTURE, change(**{**FLAT, "zero_stage": 3}))


FLAT: dict[str, object] = {
    "tensor": 1,
    "pipeline": 1,
    "data": 8,
    "expert": 2,
    "gradient_accumulation_steps": 2,
}

"""Where a balance loss of routers is refused, and where the model asks for one."""

from __future__ import annotations

from dataclasses import replace

from shardwright.diagnostics import Diagnostic
from shardwright.layout.gpu_cluster import resolve_cluster
from shardwright.layout.planning_problem import Problem
from shardwright.recipe.recipe_types import LoraSection
from shardwright.search.rule_registry import check_layout
from shardwright.utils.json_values import JsonValue
from tests.unit.models.factory import SMALL_LLAMA, graph_of, recipe_of
from tests.unit.search.test_expert_rules import FLAT, MIXTURE
from tests.unit.search.test_layout_rules import change


def found(
    config: dict[str, JsonValue], coefficient: float | None, **changes: object
) -> dict[str, Diagnostic]:
    recipe = recipe_of(config)
    recipe = replace(recipe, model=replace(recipe.model, router_aux_loss=coefficient), **changes)  # type: ignore[arg-type]
    problem = Problem(
        recipe=recipe, graph=graph_of(config), cluster=resolve_cluster(recipe.cluster)
    )
    return {d.code: d for d in check_layout(problem, change(**FLAT))}


def test_a_mixture_gets_one() -> None:
    assert not {"SW3158", "SW3159", "SW3160"} & set(found(MIXTURE, 0.001))


def test_a_dense_model_has_no_routers() -> None:
    assert "'llama'" in found(SMALL_LLAMA, 0.001)["SW3158"].message
    assert "SW3158" not in found(SMALL_LLAMA, None)


def test_what_is_not_proved_beside_it() -> None:
    lora = LoraSection(rank=4, alpha=8.0, dropout=0.0, target_modules=("q_proj",))
    assert "LoRA" in found(MIXTURE, 0.001, lora=lora)["SW3159"].message
    half = replace(recipe_of(MIXTURE).training, precision="fp16")
    assert "fp16" in found(MIXTURE, 0.001, training=half)["SW3159"].message
    assert "SW3159" not in found(MIXTURE, None, training=half)


def test_a_model_that_asks_for_one_is_told() -> None:
    asks: dict[str, JsonValue] = {
        **MIXTURE,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.02,
    }
    warning = found(asks, None)["SW3160"]
    assert warning.severity == "warning" and "router_aux_loss: 0.02" in (warning.help or "")
    assert "SW3160" not in found(asks, 0.02) and "SW3160" not in found(MIXTURE, None)

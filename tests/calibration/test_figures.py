"""The literature's known numbers, from the recipes in recipes/figures/."""

from __future__ import annotations

import functools

import pytest

from shardwright.layout.layout_estimate import Estimate
from shardwright.models.graph_builder import build_model_graph
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.search.layout_search import estimate_pinned_layout
from shardwright.utils.installation import recipes_folder
from tests.unit.models.factory import problem_of

FIGURES = recipes_folder() / "figures"
DAYS_PER_YEAR = 365.25
# arXiv 2104.04473, table 1: achieved TFLOP/s per GPU, recomputation counted; billions of parameters
# in the name.
SC21 = {
    "1.7b": 137,
    "3.6b": 138,
    "7.5b": 142,
    "18.4b": 135,
    "39.1b": 138,
    "76.1b": 140,
    "145.6b": 148,
    "310.1b": 155,
    "529.6b": 163,
    "1008b": 163,
}
SAMPLE = ("1.7b", "18.4b", "145.6b", "1008b")


@functools.cache
def estimated(name: str) -> tuple[int, Estimate]:
    """Parameters of the model, and the pinned layout's estimate."""
    recipe = load_recipe(FIGURES / f"{name}.yaml", [])
    graph = build_model_graph(recipe.model)
    return graph.total_parameters, estimate_pinned_layout(problem_of(recipe, graph))


@pytest.mark.prove
def test_gpt3_takes_288_years_on_one_v100() -> None:
    days = {gpus: estimated(f"gpt3-175b-{gpus}xv100")[1].training.days for gpus in (1, 8, 512)}
    assert days[1] / DAYS_PER_YEAR == pytest.approx(288, rel=0.02)
    assert days[8] / DAYS_PER_YEAR == pytest.approx(36, rel=0.05)
    assert days[512] / DAYS_PER_YEAR * 12 == pytest.approx(7, abs=0.5)


@pytest.mark.prove
def test_adam_in_float32_holds_16_bytes_a_parameter() -> None:
    parameters, found = estimated("fp32-adam")
    (stage,) = found.memory.stages
    states = stage.parameters_bytes + stage.gradients_bytes + stage.optimizer_bytes
    assert states / parameters == pytest.approx(16, rel=1e-6)


def test_the_bubble_is_p_minus_1_over_m() -> None:
    _, found = estimated("bubble")
    time = found.time
    work = time.step_seconds - time.bubble_seconds - time.data_comm_seconds - time.optimizer_seconds
    assert time.bubble_seconds / work == pytest.approx(3 / 12, rel=0.01)
    assert time.bubble_fraction == pytest.approx(3 / (12 + 3), rel=0.01)


@pytest.mark.prove
@pytest.mark.parametrize(
    "size",
    [pytest.param(size, marks=() if size in SAMPLE else pytest.mark.prove) for size in SC21],
)
def test_the_layouts_of_sc21(size: str) -> None:
    """Not in the fit; micro-batches and virtual stages are ours, so 10 %."""
    parameters, found = estimated(f"sc21-{size}")
    assert parameters / 1e9 == pytest.approx(float(size.removesuffix("b")), rel=0.03)
    assert found.feasible
    assert found.time.hardware_tflops_per_gpu == pytest.approx(SC21[size], rel=0.10)

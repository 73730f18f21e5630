"""What was decided is priced as it was decided: nothing of a plan is settled or placed anew."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

from shardwright.compile.compiled_folder import read_folder
from shardwright.layout.gpu_cluster import resolve_cluster
from shardwright.search.layout_resolution import estimate_layout, price_planned_layout
from tests.unit.cost.test_hpz import ZERO3, recipe_for
from tests.unit.models.factory import LLAMA_8B, graph_of, problem_of

TWO_STAGES = Path(__file__).parents[2] / "cases" / "gpt2-tied-pp2-dp2" / "expected"


def test_a_plan_without_a_second_copy_keeps_to_it() -> None:
    recipe, graph = recipe_for(), graph_of(LLAMA_8B)
    cluster = resolve_cluster(recipe.cluster)
    settled = estimate_layout(problem_of(recipe, graph, cluster), ZERO3)
    assert settled.strategy.hpz_partition_size == 8
    layout, again = price_planned_layout(
        problem_of(recipe, graph, cluster), settled.strategy, settled.boundaries
    )
    assert again == settled
    _, plain = price_planned_layout(problem_of(recipe, graph, cluster), ZERO3, settled.boundaries)
    assert plain.strategy == ZERO3
    assert plain.time.step_seconds > settled.time.step_seconds
    assert plain.memory.peak_bytes < settled.memory.peak_bytes
    assert layout.boundaries == settled.boundaries == (0, len(graph.layers))


def test_other_stages_are_priced_where_the_plan_has_them(tmp_path: Path) -> None:
    """A folder of a version that cut the layers elsewhere: explain, diff and the report price that
    cut."""
    folder = tmp_path / "out"
    shutil.copytree(TWO_STAGES, folder)
    before = read_folder(folder).estimate
    document = json.loads((folder / "plan.json").read_text())
    first, second = document["stages"]
    second["layers"].insert(0, first["layers"].pop())
    second["first_layer"] -= 1
    (folder / "plan.json").write_text(json.dumps(document))
    start, middle, stop = before.boundaries
    found = read_folder(folder).estimate
    assert found.boundaries == (start, middle - 1, stop)
    stages = [[stage.activations_bytes for stage in each.memory.stages] for each in (before, found)]
    assert stages[0][0] > stages[1][0] and stages[0][1] < stages[1][1]
    assert dataclasses.replace(found, boundaries=before.boundaries) != before

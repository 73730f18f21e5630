"""Published rows -> what the cost model takes, in process: hundreds of estimates in a fraction of a second."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.cluster.resolve import resolve_cluster
from shardwright.cost.constants import Constants
from shardwright.ir.cluster import Cluster
from shardwright.ir.model_graph import ModelGraph
from shardwright.ir.recipe import Recipe
from shardwright.layout.estimate import Estimate
from shardwright.layout.problem import Problem
from shardwright.layout.strategy import Strategy
from shardwright.model.build import build_model_graph
from shardwright.recipe.load import load_recipe
from shardwright.search.settle import settled_estimate
from shardwright.search.space import candidates
from tools.fit_cost import score

ROWS = Path(__file__).with_name("rows.json")
# A row's project, from the start of its `source`.
PROJECTS = {
    "llm-foundry": "MPT (llm-foundry)",
    "BigScience": "BigScience",
    "BLOOM": "BigScience",
    "Megatron": "NVIDIA's papers",
    "Korthikanti": "NVIDIA's papers",
    "MT-NLG": "NVIDIA's papers",
    "torchtitan": "torchtitan",
}

# Generations of GPUs among the rows.
HARDWARE = ("V100", "A100", "H100")

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    row: Row
    recipe: Recipe
    graph: ModelGraph
    cluster: Cluster
    strategy: Strategy

    @property
    def project(self) -> str:
        return project_of(self.row)


def project_of(row: Row) -> str:
    return next(name for start, name in PROJECTS.items() if row["source"].startswith(start))


def is_megatron(row: Row) -> bool:
    """Megatron-LM's own runs: the scorer's recipe says `target: deepspeed` where they use nothing beyond it."""
    return bool(row["source"].startswith(("Megatron SC", "Korthikanti")))


def hardware_of(case: Case) -> str:
    """One of HARDWARE."""
    gpu: str = case.row["hardware"]["gpu"]
    return gpu.partition("-")[0]


def load_cases(path: Path = ROWS) -> list[Case]:
    """Every row that the scorer uses, through the recipe that the scorer makes of it."""
    return [case_of(row) for row in score.rows(path) if score.usable(row)]


def case_of(row: Row) -> Case:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "recipe.yaml"
        file.write_text(json.dumps(score.recipe(row)))
        recipe = load_recipe(file, [])
    graph, cluster = build_model_graph(recipe.model), resolve_cluster(recipe.cluster)
    (strategy,) = candidates(Problem(recipe=recipe, graph=graph, cluster=cluster))
    return Case(row=row, recipe=recipe, graph=graph, cluster=cluster, strategy=strategy)


def estimate(case: Case, constants: Constants) -> Estimate:
    return settled_estimate(
        Problem(recipe=case.recipe, graph=case.graph, cluster=case.cluster), case.strategy, (), constants
    )


def as_scored(found: Estimate) -> dict[str, Any]:
    """The part of `estimate --json` that the scorer reads."""
    return {"time": dataclasses.asdict(found.time), "memory": dataclasses.asdict(found.memory)}

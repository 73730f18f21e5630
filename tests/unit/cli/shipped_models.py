"""Models, clusters and recipes for the tests of `explain` and `--why-not`: shipped graphs, so
nothing is traced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardwright.layout.gpu_cluster import Cluster, resolve_cluster
from shardwright.models.graph_builder import build_model_graph
from shardwright.models.model_graph import ModelGraph
from shardwright.recipe.recipe_types import Recipe
from tests.unit.models.factory import model_section, recipe_of


def shipped(source: str) -> ModelGraph:
    return build_model_graph(model_section(source=source))


MODELS = {"llama": shipped("meta-llama/Llama-3.1-8B"), "gpt2": shipped("openai-community/gpt2-xl")}


def recipe_for(nodes: int = 1, **parallelism: object) -> Recipe:
    cluster = {"nodes": nodes, "gpu": "a100-sxm4-80gb", "host_memory_gib": 1800.0}
    return recipe_of(
        cluster=cluster,
        training={"sequence_length": 1024, "global_batch_size": 64},
        parallelism=parallelism,
    )


def cluster_of(nodes: int) -> Cluster:
    return resolve_cluster(recipe_for(nodes).cluster)


def write_llama(folder: Path, file: str = "r.yaml", /, **changes: Any) -> str:
    document = {
        "version": 1,
        "name": "test",
        "model": {"source": "meta-llama/Llama-3.1-8B", "weights": "random"},
        "cluster": {"nodes": 2, "gpus_per_node": 8, "gpu": "a100-sxm4-80gb"},
        "training": {"sequence_length": 2048, "global_batch_size": 256, "steps": 1000},
        "data": {"kind": "synthetic"},
        **changes,
    }
    path = folder / file
    path.write_text(json.dumps(document))
    return str(path)

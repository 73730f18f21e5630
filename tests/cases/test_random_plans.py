"""Random legal plans, up to 1,024 ranks: DeepSpeed loads each ds_config.json and gives back the
plan's numbers."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwright.compile.recipe_compiler import CompileResult, compile_recipe
from shardwright.diagnostics import Refusal
from shardwright.engines.deepspeed.ds_config_schema import ds_config_schema, schema_mismatches
from shardwright.layout.gpu_cluster import resolve_cluster
from shardwright.layout.planning_problem import Problem
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.search.legal_layouts import candidate_layouts
from shardwright.search.rule_registry import check_layout
from tests.cases.engine_numbers import load, numbers
from tests.unit.models.factory import SMALL_GPT2, SMALL_LLAMA, graph_of, problem_of

MODELS: tuple[dict[str, Any], ...] = (
    {**SMALL_LLAMA, "num_hidden_layers": 14},
    {**SMALL_LLAMA, "model_type": "qwen2", "num_hidden_layers": 6, "tie_word_embeddings": True},
    {**SMALL_GPT2, "n_layer": 30},
    {
        **SMALL_LLAMA,
        "num_hidden_layers": 22,
        "num_key_value_heads": 8,
        "hidden_size": 1024,
        "vocab_size": 32000,
    },
)
NODES = (1, 2, 4, 8, 16, 64, 128)


def random_plans(count: int, seed: int, folder: Path) -> Iterator[CompileResult]:
    """Pinned layouts drawn from all legal ones of random models, clusters and trainings."""
    draw = random.Random(seed)
    made = 0
    while made < count:
        precision = draw.choice(("bf16", "bf16", "fp16", "fp32"))
        document: dict[str, Any] = {
            "version": 1,
            "name": f"random-{made}",
            "model": {"config": draw.choice(MODELS), "weights": "random"},
            "cluster": {
                "nodes": draw.choice(NODES),
                "gpus_per_node": draw.choice((4, 8)),
                "gpu": "a100-sxm4-80gb",
                "host_memory_gib": 1800,
            },
            "training": {
                "sequence_length": 128,
                "global_batch_size": 1024 * draw.choice((1, 2, 3)),
                "steps": 10,
                "precision": precision,
                "gradient_accumulation_dtype": draw.choice(("auto", "fp32", precision)),
                "gradient_clipping": draw.choice((0, 0.5, 1.0)),
            },
            "data": {"kind": "synthetic"},
            "parallelism": {"offload": draw.choice(("none", "none", "auto"))},
        }
        path = folder / f"{made}.json"
        path.write_text(json.dumps(document))
        recipe = load_recipe(path)
        graph, cluster = graph_of(document["model"]["config"]), resolve_cluster(recipe.cluster)
        strategy = draw.choice(list(candidate_layouts(problem_of(recipe, graph, cluster))))
        if any(
            d.severity == "error"
            for d in check_layout(Problem(recipe=recipe, graph=graph, cluster=cluster), strategy)
        ):
            continue
        pins = dataclasses.asdict(strategy)
        del (
            pins["gradient_accumulation_steps"],
            pins["loss"],
            pins["hpz_partition_size"],
        )  # these follow from the others, pins["loss"]  # of the model section
        path.write_text(json.dumps({**document, "parallelism": pins}))
        try:
            yield compile_recipe(load_recipe(path))
        except Refusal as refusal:
            # The one thing that is not a rule over the layout.
            assert {d.code for d in refusal.diagnostics} == {"SW3201"}, refusal
            continue
        made += 1


def check(compiled: list[CompileResult], folder: Path) -> None:
    for result, loaded in zip(compiled, load(compiled, folder), strict=True):
        assert loaded == numbers(result.plan), result.plan.strategy
        assert (
            schema_mismatches(json.loads(result.files["ds_config.json"]), ds_config_schema()) == ()
        )


def plan_with_hpz(folder: Path, tensor: int) -> CompileResult:
    """4 nodes over slow links, each with a second copy of the weights for each of the tensor
    ranks."""
    path = folder / f"hpz-{tensor}.json"
    cluster = {
        "nodes": 4,
        "gpus_per_node": 8,
        "gpu": "a100-sxm4-80gb",
        "inter_node_gbits_per_second": 1,
    }
    document = {
        "version": 1,
        "name": "hpz",
        "model": {"config": MODELS[3], "weights": "random"},
        "cluster": cluster,
        "training": {"sequence_length": 128, "global_batch_size": 1024, "steps": 10},
        "data": {"kind": "synthetic"},
        "parallelism": {"tensor": tensor, "pipeline": 1, "zero_stage": 3, "micro_batch_size": 1},
    }
    path.write_text(json.dumps(document))
    return compile_recipe(load_recipe(path))


@pytest.mark.parametrize(
    ("tensor", "others"),
    [
        (1, ("accelerate/ds_config.json", "accelerate/ds_config.trainer.json")),
        (2, ("ds_config.autotp.json",)),
    ],
)
def test_scripts_of_ones_own_make_no_second_copy(
    tensor: int, others: tuple[str, ...], tmp_path: Path
) -> None:
    compiled = plan_with_hpz(tmp_path, tensor)
    assert compiled.plan.strategy.hpz_partition_size == 8 // tensor
    config = json.loads(compiled.files["ds_config.json"])
    assert config["zero_optimization"]["zero_hpz_partition_size"] == 8 // tensor
    for name in others:
        assert (
            "zero_hpz_partition_size" not in json.loads(compiled.files[name])["zero_optimization"]
        )


@pytest.mark.prove
def test_a_sample(tmp_path: Path) -> None:
    compiled = [*random_plans(4, 1, tmp_path), plan_with_hpz(tmp_path, 2)]
    assert len({result.plan.strategy for result in compiled}) == 5
    check(compiled, tmp_path / "folders")


@pytest.mark.prove
def test_two_hundred(tmp_path: Path, proved: Callable[[str, str, dict[str, Any]], None]) -> None:
    compiled = list(random_plans(200, 2, tmp_path))
    worlds = [result.plan.strategy.world_size for result in compiled]
    assert max(worlds) == 1024
    check(compiled, tmp_path / "folders")
    stages = {
        str(stage): sum(r.plan.strategy.zero_stage == stage for r in compiled) for stage in range(4)
    }
    copied = sum(result.plan.strategy.hpz_partition_size > 1 for result in compiled)
    pipelines = sum(result.plan.strategy.pipeline > 1 for result in compiled)
    figures = {
        "plans": len(compiled),
        "largest_world": max(worlds),
        "with_a_pipeline": pipelines,
        "zero": stages,
        "hpz": copied,
    }
    proved("ds-config", "random legal plans", figures)

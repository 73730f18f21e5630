"""Where layers are placed: real models against DeepSpeed's own methods, blocks that stay together,
memory."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from deepspeed.runtime.utils import partition_balanced, partition_uniform

from shardwright.cost.cost_constants import default_constants
from shardwright.cost.layer_times import pass_times
from shardwright.cost.priced_layout import PricedLayout
from shardwright.diagnostics import Diagnostic
from shardwright.layout.gpu_cluster import resolve_cluster
from shardwright.layout.layout import Layout
from shardwright.layout.parameter_sharding import LayerStages
from shardwright.layout.pipeline_step_time import step_seconds
from shardwright.layout.planning_problem import Problem
from shardwright.models.model_graph import Layer, ModelGraph
from shardwright.recipe.literal_types import Checkpointing, Schedule
from shardwright.recipe.recipe_types import Recipe
from shardwright.search.layout_resolution import estimate_checked_layout, with_stages_assigned
from shardwright.search.rule_registry import check_layout
from shardwright.utils.json_values import JsonValue
from tests.unit.models.factory import (
    LLAMA_8B,
    LLAMA_70B,
    SMALL_LLAMA,
    graph_of,
    problem_of,
    recipe_of,
)


def strategy(
    pipeline: int,
    schedule: Schedule = "1f1b",
    *,
    m: int = 16,
    checkpointing: Checkpointing = "none",
) -> Layout:
    return Layout(
        tensor=1,
        pipeline=pipeline,
        data=1,
        zero_stage=1,
        micro_batch_size=1,
        gradient_accumulation_steps=m,
        activation_checkpointing=checkpointing,
        schedule=schedule,
        offload="none",
    )


def boundaries(recipe: Recipe, graph: ModelGraph, s: Layout) -> tuple[int, ...]:
    return with_stages_assigned(problem_of(recipe, graph), s).boundaries


def too_few(recipe: Recipe, graph: ModelGraph, s: Layout) -> list[Diagnostic]:
    found = check_layout(
        Problem(recipe=recipe, graph=graph, cluster=resolve_cluster(recipe.cluster)), s
    )
    return [d for d in found if d.code == "SW3106"]


def layers_of(graph: ModelGraph, bounds: tuple[int, ...], stage: int) -> tuple[Layer, ...]:
    return graph.layers[bounds[stage] : bounds[stage + 1]]


def step(layout: PricedLayout, cut: tuple[int, ...]) -> float:
    s, found = layout.strategy, pass_times(layout)
    forward, backward = (
        tuple(a[stop] - a[start] + b[stop] - b[start] for start, stop in itertools.pairwise(cut))
        for a, b in (
            (found.forward_compute, found.forward_comm),
            (found.backward_compute, found.backward_comm),
        )
    )
    return step_seconds(
        s.schedule, s.gradient_accumulation_steps, forward, backward, found.send_seconds
    )


def deepspeeds(graph: ModelGraph, stages: int) -> dict[str, tuple[int, ...]]:
    """What DeepSpeed's partition_method would do, by its own functions (pipe/module.py,
    _partition_layers)."""
    parameters = [layer.numel for layer in graph.layers]
    decoders = [int(layer.kind == "decoder") for layer in graph.layers]
    return {
        "parameters": tuple(map(int, partition_balanced(parameters, stages))),
        "uniform": tuple(map(int, partition_uniform(len(parameters), stages))),
        "type:decoder": tuple(map(int, partition_balanced(decoders, stages))),
    }


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipev"])
@pytest.mark.parametrize("pipeline", [2, 4, 8])
@pytest.mark.parametrize("config", [LLAMA_8B, LLAMA_70B], ids=["8b", "70b"])
def test_never_slower_than_deepspeeds_methods(
    config: dict[str, JsonValue], pipeline: int, schedule: Schedule
) -> None:
    graph = graph_of(config)
    for m in (2 * pipeline, 8 * pipeline):
        # Memory ignored, as DeepSpeed's methods do.
        recipe = recipe_of(
            config, training={"sequence_length": 4096}, assume={"ignore_memory": True}
        )
        s = strategy(pipeline, schedule, m=m)
        layout = with_stages_assigned(problem_of(recipe, graph), s)
        ours = step(layout, layout.boundaries)
        for method, cut in deepspeeds(graph, s.stages).items():
            assert ours <= step(layout, cut) * (1 + 1e-4), (method, m)


@pytest.mark.parametrize(
    ("pipeline", "decoders"), [(2, [10, 6]), (4, [5, 5, 5, 1]), (8, [3, 2, 3, 2, 3, 2, 1, 0])]
)
def test_nanotrons_stages_end_where_their_products_reach_their_share(
    pipeline: int, decoders: list[int]
) -> None:
    """Four layers' worth of products in the head: the ultrascale playbook's model of 1B."""
    config: dict[str, JsonValue] = {
        **SMALL_LLAMA,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 131072,
    }
    graph = graph_of(config)
    recipe = recipe_of(config, target="megatron", assume={"kernels": "hf"})
    placed = boundaries(recipe, graph, strategy(pipeline))
    kinds = [[layer.kind for layer in layers_of(graph, placed, stage)] for stage in range(pipeline)]
    assert [stage.count("decoder") for stage in kinds] == decoders
    assert kinds[-1][-1] == "head" and all(kinds)


def test_search_and_compile_place_the_same() -> None:
    """What the search prices on a pipeline rank are the layers that compile puts there: bytes of
    their parameters, counted on the graph, in the estimate."""
    recipe, graph = recipe_of(LLAMA_8B, training={"sequence_length": 4096}), graph_of(LLAMA_8B)
    cluster, cuts = resolve_cluster(recipe.cluster), set()
    for s in (
        strategy(4),
        strategy(8),
        strategy(4, "dualpipev"),
        strategy(8, m=64, checkpointing="full"),
    ):
        priced = estimate_checked_layout(problem_of(recipe, graph, cluster), s, ())
        bounds = priced.boundaries
        partition = LayerStages(boundaries=bounds, schedule=s.schedule)
        partition.verify(len(graph.layers))
        numel = [
            sum(
                layer.numel
                for at in partition.stages_of_pipeline_rank(rank)
                for layer in layers_of(graph, bounds, at)
            )
            for rank in range(s.pipeline)
        ]
        assert [stage.parameters_bytes for stage in priced.memory.stages] == [2 * n for n in numel]
        cuts.add(bounds)
    assert len(cuts) == 4


def test_the_head_is_charged_and_the_lookup_is_not() -> None:
    """Llama-3.1-8B over 8: the head costs as much as 2.4 decoder layers, so the last stage gets
    fewer of them."""
    recipe, graph = recipe_of(LLAMA_8B, training={"sequence_length": 8192}), graph_of(LLAMA_8B)
    sizes = [
        b - a
        for a, b in itertools.pairwise(boundaries(recipe, graph, strategy(8, checkpointing="full")))
    ]
    decoders = [sizes[0] - 1, *sizes[1:-1], sizes[-1] - 1]
    assert decoders[-1] == min(decoders) < max(decoders)


def test_a_partition_that_fits_comes_before_a_faster_one_that_does_not() -> None:
    """The fastest puts more layers in front, where the most micro-batches are in flight."""
    graph, s = graph_of(LLAMA_8B), strategy(8, m=16)
    training = {"sequence_length": 8192}
    free = recipe_of(LLAMA_8B, training=training, assume={"ignore_memory": True})
    cluster = resolve_cluster(free.cluster)
    fastest = estimate_checked_layout(problem_of(free, graph, cluster), s, ())
    capacity = cluster.capacity_bytes
    # Just below what the fastest partition needs on its fullest rank, the allocator's slack left
    # out.
    live = max(m.peak_bytes for m in fastest.memory.stages) / (
        1 + default_constants().fragmentation
    )
    pinned = recipe_of(
        LLAMA_8B,
        training=training,
        parallelism={"memory_headroom": 1 - 0.98 * live / capacity},
    )
    tight = estimate_checked_layout(problem_of(pinned, graph, cluster), s, ())
    assert tight.memory.fits
    assert tight.time.step_seconds > fastest.time.step_seconds
    assert boundaries(pinned, graph, s) != boundaries(free, graph, s)
    hopeless = recipe_of(LLAMA_8B, training=training, parallelism={"memory_headroom": 0.95})
    assert not estimate_checked_layout(problem_of(hopeless, graph, cluster), s, ()).memory.fits


@pytest.mark.parametrize(("pipeline", "schedule"), [(7, "1f1b"), (4, "dualpipev")])
def test_fewer_layers_than_stages(pipeline: int, schedule: Schedule) -> None:
    (found,) = too_few(recipe_of(), graph_of(SMALL_LLAMA), strategy(pipeline, schedule))
    assert (found.code, found.key) == ("SW3106", ("parallelism", "pipeline"))
    assert found.valid == (("6",) if schedule == "1f1b" else ("3",))
    boundaries(recipe_of(), graph_of(SMALL_LLAMA), strategy(int(found.valid[0]), schedule))


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipev"])
def test_layers_that_share_stay_on_one_stage(schedule: Schedule) -> None:
    recipe, graph = recipe_of(SMALL_LLAMA), graph_of(SMALL_LLAMA)
    shared = dataclasses.replace(graph, cut=dataclasses.replace(graph.cut, together=((1, 2),)))
    degrees = {"1f1b": (2, 3, 4, 5), "dualpipev": (1, 2)}[schedule]
    for pipeline in degrees:
        s = strategy(pipeline, schedule)
        found = boundaries(recipe, shared, s)
        assert len(found) == s.stages + 1
        assert 3 not in found, "layers[2] and layers[3] are decoder layers 1 and 2"
    (diagnostic,) = too_few(recipe, shared, strategy(degrees[-1] + 1, schedule))
    assert (diagnostic.code, diagnostic.valid) == ("SW3106", (str(degrees[-1]),))
    assert "Decoder layers 1 to 2 share parameters or state" in (diagnostic.help or "")

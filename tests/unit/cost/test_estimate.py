"""The identities that `estimate --json` promises of every estimate, and that the numbers move the
right way."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.cost.cost_constants import default_constants
from shardwright.cost.layer_shapes import model_shapes
from shardwright.cost.layout_costs import training_estimate
from shardwright.diagnostics import Refusal
from shardwright.layout.gpu_cluster import resolve_cluster
from shardwright.layout.layout import Layout
from shardwright.layout.layout_estimate import Estimate
from shardwright.layout.planning_problem import Problem
from shardwright.recipe.literal_types import Checkpointing, PartialCheckpointing, Schedule
from shardwright.recipe.recipe_types import Recipe
from shardwright.search.layout_resolution import estimate_layout, with_stages_assigned
from shardwright.search.rule_registry import check_layout
from shardwright.utils.json_values import JsonValue
from tests.unit.models.factory import (
    LLAMA_8B,
    SMALL_GPT2,
    SMALL_LLAMA,
    graph_of,
    problem_of,
    recipe_of,
)
from tools.fit_cost.published_runs import live_bytes

BASE = Layout(
    tensor=1,
    pipeline=1,
    data=8,
    zero_stage=1,
    micro_batch_size=1,
    gradient_accumulation_steps=4,
    activation_checkpointing="none",
    schedule="1f1b",
    offload="none",
)
CONFIGS = {"llama": SMALL_LLAMA, "gpt2": SMALL_GPT2, "8b": LLAMA_8B}


def estimate(
    config: dict[str, JsonValue],
    strategy: Layout,
    *,
    recipe: Recipe | None = None,
    gpus: int = 8,
    nodes: int = 1,
) -> Estimate:
    batch = strategy.micro_batch_size * strategy.gradient_accumulation_steps * strategy.data
    recipe = sized(recipe or recipe_of(config), batch, gpus, nodes)
    return estimate_layout(problem_of(recipe, graph_of(config)), strategy)


def sized(recipe: Recipe, batch: int, gpus: int, nodes: int) -> Recipe:
    return dataclasses.replace(
        recipe,
        training=dataclasses.replace(recipe.training, global_batch_size=batch),
        cluster=dataclasses.replace(recipe.cluster, gpus_per_node=gpus, nodes=nodes),
    )


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(sorted(CONFIGS)),
    tensor=st.sampled_from([1, 2, 4]),
    pipeline=st.sampled_from([1, 2, 3, 4, 9]),
    data=st.sampled_from([1, 2, 16]),
    zero_stage=st.integers(0, 3),
    micro_batch=st.sampled_from([1, 3]),
    accumulation=st.sampled_from([1, 2, 8, 32]),
    checkpointing=st.sampled_from(["none", "selective", "full", PartialCheckpointing(full=1)]),
    schedule=st.sampled_from(["1f1b", "dualpipev"]),
    virtual_stages=st.sampled_from([1, 2]),
    sequence_parallel=st.booleans(),
    kernels=st.sampled_from(["auto", "hf", "megatron", "compiled"]),
    mfu=st.sampled_from([None, 0.4]),
)
def test_identities(
    name: str,
    tensor: int,
    pipeline: int,
    data: int,
    zero_stage: int,
    micro_batch: int,
    accumulation: int,
    checkpointing: Checkpointing,
    schedule: Schedule,
    virtual_stages: int,
    sequence_parallel: bool,
    kernels: str,
    mfu: float | None,
) -> None:
    """Numbers come for every layout that multiplies out, legal or not, and they add up."""
    strategy = dataclasses.replace(
        BASE,
        tensor=tensor,
        pipeline=pipeline,
        data=data,
        zero_stage=zero_stage,
        micro_batch_size=micro_batch,
        gradient_accumulation_steps=accumulation,
        activation_checkpointing=checkpointing,
        schedule=schedule,
        virtual_stages=virtual_stages,
        sequence_parallel=sequence_parallel,
    )
    config = CONFIGS[name]
    recipe = recipe_of(config, assume={"kernels": kernels, "mfu": mfu})
    found = estimate(config, strategy, recipe=recipe, gpus=tensor, nodes=pipeline * data)
    time, memory = found.time, found.memory
    parts = (
        time.compute_seconds,
        time.tensor_comm_seconds,
        time.pipeline_comm_seconds,
        time.data_comm_seconds,
        time.optimizer_seconds,
        time.bubble_seconds,
    )
    assert all(math.isfinite(x) and x >= 0 for x in parts)
    assert sum(parts) == pytest.approx(time.step_seconds, rel=1e-6)
    assert 0 <= time.bubble_fraction < 1
    assert time.hardware_tflops_per_gpu >= time.model_tflops_per_gpu > 0
    assert (time.hardware_tflops_per_gpu > time.model_tflops_per_gpu) == (checkpointing != "none")
    assert time.mfu == pytest.approx(time.model_tflops_per_gpu / 989.4)
    tokens = micro_batch * accumulation * data * recipe.training.sequence_length
    assert time.tokens_per_second_per_gpu == pytest.approx(
        tokens / time.step_seconds / strategy.world_size
    )
    assert (time.tensor_comm_seconds > 0) == (tensor > 1)
    assert (time.pipeline_comm_seconds > 0) == (pipeline > 1)
    assert len(memory.stages) == pipeline
    for stage in memory.stages:
        # The parts that estimate --json names are all that there is, and each of them is used.
        parts_bytes = [
            v for k, v in dataclasses.asdict(stage).items() if k not in ("stage", "peak_bytes")
        ]
        assert len(parts_bytes) == 5 and sum(parts_bytes) == stage.peak_bytes <= memory.peak_bytes
    assert memory.peak_bytes in {stage.peak_bytes for stage in memory.stages}
    assert memory.capacity_bytes == 80 * 2**30
    # Of the whole model, whoever holds it: embedding and head of a tied model are two where a
    # pipeline parts them.
    graph = graph_of(config)
    once = sum(p.numel for layer in graph.layers for p in layer.parameters)
    held = (
        sum(stage.parameters_bytes for stage in memory.stages)
        * (data if zero_stage == 3 else 1)
        / 2
    )
    most = once * (
        1 if found.strategy.hpz_partition_size == 1 else 2
    )  # hpZ: a second copy inside each node
    assert graph.total_parameters / tensor <= held * (1 + 1e-6) and held <= most * (1 + 1e-6)
    whole = sized(recipe, micro_batch * accumulation * data, tensor, pipeline * data)
    refused = check_layout(
        Problem(recipe=whole, graph=graph, cluster=resolve_cluster(whole.cluster)), strategy
    )
    broken = [d.code for d in refused if d.severity == "error"]
    assert found.feasible == (not broken and memory.fits)
    assert [d.code for d in found.diagnostics if d.severity == "error"] == broken + ["SW3201"] * (
        not memory.fits
    )


def test_model_flops_are_three_forwards() -> None:
    """Llama-3.1-8B: 6 FLOPs per parameter outside the lookup, and 12 L H S for attention (arXiv
    2104.04473)."""
    found = estimate(LLAMA_8B, BASE)
    graph = graph_of(LLAMA_8B)
    matrices = (
        graph.total_parameters - 128256 * 4096 - 65 * 4096
    )  # without the lookup table and the norms
    per_token = 6 * matrices + 12 * 32 * 4096 * 128
    assert found.time.model_tflops_per_gpu * 1e12 == pytest.approx(
        per_token * found.time.tokens_per_second_per_gpu
    )


def test_full_recomputation_adds_a_forward_of_the_decoder() -> None:
    plain, full = (
        estimate(LLAMA_8B, BASE).time,
        estimate(LLAMA_8B, change(activation_checkpointing="full")).time,
    )
    head = 2 * 128256 * 4096
    forward = plain.model_tflops_per_gpu * 1e12 / plain.tokens_per_second_per_gpu / 3
    again = (
        (full.hardware_tflops_per_gpu - full.model_tflops_per_gpu)
        * 1e12
        / full.tokens_per_second_per_gpu
    )
    assert again == pytest.approx(forward - head)
    assert full.step_seconds > plain.step_seconds


def change(**changes: object) -> Layout:
    return dataclasses.replace(BASE, **changes)  # type: ignore[arg-type]


def test_the_bubble_of_even_stages() -> None:
    """(p - 1) / (m + p - 1), where no stage differs: a vocabulary of one token makes the head
    weightless."""
    config = {**LLAMA_8B, "vocab_size": 1, "num_hidden_layers": 30}
    for accumulation in (4, 16):
        strategy = change(pipeline=4, data=2, gradient_accumulation_steps=accumulation)
        even = estimate({**config, "num_hidden_layers": 32}, strategy).time
        assert even.bubble_fraction == pytest.approx(3 / (accumulation + 3), rel=0.02)
        uneven = estimate(config, strategy).time  # 30 layers over 4 stages
        assert uneven.step_seconds / 30 > even.step_seconds / 32


def test_states_follow_the_zero_stages() -> None:
    """Bytes per parameter on 8 data ranks in bf16: 2 + (2 + 4) + 12/8, then the gradients, then the
    parameters cut."""
    numel = graph_of(LLAMA_8B).total_parameters
    expected = {0: (2, 6, 12), 1: (2, 6, 12 / 8), 2: (2, 4 / 8, 12 / 8), 3: (2 / 8, 4 / 8, 12 / 8)}
    for zero_stage, per_parameter in expected.items():
        stage = estimate(LLAMA_8B, change(zero_stage=zero_stage)).memory.stages[0]
        got = (stage.parameters_bytes, stage.gradients_bytes, stage.optimizer_bytes)
        assert [x / numel for x in got] == pytest.approx(per_parameter, rel=1e-6), zero_stage


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_parameters_of_a_tensor_rank(degree: int) -> None:
    """By hand: matrices and the vocabulary are cut, norms are not, nor are the biases behind a
    row-parallel product."""
    h, f, v, kv = 4096, 14336, 128256, 1024
    llama = 2 * v * h / degree + h + 32 * ((2 * h * h + 2 * h * kv + 3 * h * f) / degree + 2 * h)
    assert (
        estimate(LLAMA_8B, change(tensor=degree, data=1), gpus=degree)
        .memory.stages[0]
        .parameters_bytes
        == 2 * llama
    )
    h, v, positions, layers = 64, 259, 128, 4
    sizes = ("n_embd", "vocab_size", "n_positions", "n_layer")
    assert [SMALL_GPT2[k] for k in sizes] == [h, v, positions, layers]
    cut = 3 * h * h + 3 * h + h * h + 4 * h * h + 4 * h + 4 * h * h
    gpt2 = -(-v // degree) * h + positions * h + 2 * h + layers * (cut / degree + 2 * h + 4 * h)
    assert (
        estimate(SMALL_GPT2, change(tensor=degree, data=1), gpus=degree)
        .memory.stages[0]
        .parameters_bytes
        == 2 * gpt2
    )


def test_days_hours_and_money() -> None:
    """100 steps of 36 seconds are an hour: 8 GPU hours on 8 ranks, 20 at 2.5 each."""
    time = dataclasses.replace(estimate(LLAMA_8B, BASE).time, step_seconds=36.0)
    recipe = recipe_of(training={"steps": 100}, cluster={"price_per_gpu_hour": 2.5})
    found = training_estimate(
        recipe.training.step_count_or_zero, resolve_cluster(recipe.cluster), time
    )
    assert (found.steps, found.gpu_hours, found.cost) == (100, 8.0, 20.0)
    assert found.days == pytest.approx(1 / 24)


def test_activations_follow_checkpointing_and_micro_batches_in_flight() -> None:
    kept = [
        estimate(LLAMA_8B, change(activation_checkpointing=mode)).memory.stages[0].activations_bytes
        for mode in ("none", "selective", "full")
    ]
    assert kept[0] > kept[1] > kept[2] == 32 * 128 * 4096 * 2
    stages = estimate(
        LLAMA_8B, change(pipeline=4, data=2, gradient_accumulation_steps=8)
    ).memory.stages
    per_layer = [s.activations_bytes for s in stages]
    assert per_layer[0] > per_layer[1] > per_layer[2] > per_layer[3]


def test_what_saves_memory_or_time_does() -> None:
    def peak(**changes: object) -> int:
        return estimate(LLAMA_8B, change(**changes)).memory.peak_bytes

    assert peak(tensor=2, data=4) < peak()
    assert peak(pipeline=2, data=4) < peak()
    assert peak(zero_stage=3) < peak(zero_stage=2) < peak(zero_stage=1) < peak(zero_stage=0)
    assert peak(micro_batch_size=4) > peak()
    assert peak(pipeline=2, data=4, schedule="dualpipev") > peak(pipeline=2, data=4)
    interleaved = {"pipeline": 4, "data": 2, "gradient_accumulation_steps": 4}
    assert (
        estimate(LLAMA_8B, change(**interleaved, schedule="dualpipev")).time.bubble_seconds
        < estimate(LLAMA_8B, change(**interleaved)).time.bubble_seconds
    )


def test_it_does_not_fit() -> None:
    found = estimate(LLAMA_8B, change(zero_stage=0))
    assert not found.memory.fits and not found.feasible
    assert "SW3201" in {d.code for d in found.diagnostics}
    ignoring = estimate(
        LLAMA_8B,
        change(zero_stage=1, micro_batch_size=64),
        recipe=recipe_of(assume={"ignore_memory": True}),
    )
    assert ignoring.memory.peak_bytes > ignoring.memory.capacity_bytes
    assert (
        not ignoring.memory.fits and ignoring.feasible
    )  # the refusal is silenced, the fact is not


def test_headroom_is_kept_free() -> None:
    """What is live has to fit; the allocator's slack gives way."""
    peak = estimate(LLAMA_8B, BASE).memory.peak_bytes
    graph, whole = graph_of(LLAMA_8B), recipe_of(LLAMA_8B)
    node = resolve_cluster(dataclasses.replace(whole.cluster, gpus_per_node=8, nodes=1))
    live = live_bytes(with_stages_assigned(problem_of(whole, graph, node), BASE))
    share = 1 - live / (80 * 2**30)
    for headroom, fits in ((share - 0.01, True), (share + 0.01, False)):
        recipe = recipe_of(parallelism={"memory_headroom": headroom})
        memory = estimate(LLAMA_8B, BASE, recipe=recipe).memory
        assert memory.fits == fits
        assert live - 100 < memory.peak_bytes < peak


def test_assumed_mfu_is_the_mfu_of_the_compute() -> None:
    time = estimate(LLAMA_8B, BASE, recipe=recipe_of(assume={"mfu": 0.25})).time
    overhead = time.step_seconds - time.compute_seconds
    assert time.mfu * time.step_seconds / (time.step_seconds - overhead) == pytest.approx(
        0.25, rel=0.1
    )


def test_tokens_become_steps_and_money() -> None:
    recipe = recipe_of(
        training={"steps": None, "tokens": 32 * 128 * 5 + 1},
        cluster={"price_per_gpu_hour": 2.5},
    )
    training = estimate(LLAMA_8B, BASE, recipe=recipe).training
    assert training.steps == 6
    assert training.cost == pytest.approx(2.5 * training.gpu_hours)


def test_no_numbers_where_the_world_or_the_batch_does_not_work_out() -> None:
    recipe = recipe_of(LLAMA_8B)
    with pytest.raises(Refusal) as caught:
        estimate_layout(
            problem_of(recipe, graph_of(LLAMA_8B)), change(data=3, zero_stage=3, pipeline=2)
        )
    assert [d.code for d in caught.value.diagnostics] == ["SW3101", "SW3102", "SW3108"]


@pytest.mark.parametrize(
    "layout",
    [
        {"tensor": 8, "data": 16, "zero_stage": 1},
        {"tensor": 4, "data": 8, "pipeline": 4},
        {"data": 128, "zero_stage": 3},
        {"data": 32, "context": 4},
    ],
    ids=str,
)
def test_hosts_of_an_nvlink_domain_take_the_seconds_of_one_node(layout: dict[str, int]) -> None:
    strategy = change(**layout)
    batch = strategy.data * strategy.gradient_accumulation_steps

    def seconds(nodes: int, gpus: int, domain: int | None) -> float:
        cluster = {"gpu": "b200-sxm-180gb", "nvlink_domain_gpus": domain}
        recipe = sized(recipe_of(LLAMA_8B, cluster=cluster), batch, gpus, nodes)
        found = estimate_layout(problem_of(recipe, graph_of(LLAMA_8B)), strategy)
        return found.time.step_seconds

    assert seconds(32, 4, 64) == seconds(2, 64, None) < seconds(32, 4, None)


def test_hooks_of_zero_3_run_while_tensor_parallel_collectives_do() -> None:
    """The host's hooks bound a small model's micro-batch. They do not add to the collectives, whose
    time grows with the wait for their launches where the computation is faster."""
    strategy = change(tensor=8, data=2, zero_stage=3, gradient_accumulation_steps=1)
    problem = problem_of(sized(recipe_of(SMALL_LLAMA), 2, 8, 2), graph_of(SMALL_LLAMA))
    time = estimate_layout(problem, strategy).time
    modules = model_shapes(problem.graph, 1).modules
    hooks = 2 * 2 * modules[-1] * default_constants().hook_seconds
    assert time.tensor_comm_seconds > 0 and time.optimizer_seconds < 1e-3 * hooks
    assert time.step_seconds == pytest.approx(hooks, rel=1e-3)

"""Expected times against simulated failures, Young's and Daly's interval against the best one, and
the limits."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from typing import Literal

import pytest

from shardwright.cost.cost_constants import default_constants
from shardwright.cost.goodput import (
    FailureModel,
    Goodput,
    MemoryCopyCost,
    auto_interval,
    check_host_memory,
    expected_seconds,
    expected_seconds_with_copies,
    goodput,
    goodput_constants,
    memory_copy_cost,
    node_checkpoint_bytes,
    young_daly_seconds,
)
from shardwright.cost.priced_layout import build_priced_layout, with_boundaries
from shardwright.diagnostics import Refusal
from shardwright.layout.layout import Layout
from shardwright.layout.layout_estimate import Estimate
from shardwright.layout.optimizers import OPTIMIZERS
from shardwright.layout.planning_problem import Problem
from shardwright.recipe.recipe_types import Recipe
from shardwright.report.plan_sentences import goodput_lines
from shardwright.search.layout_resolution import price_planned_layout
from shardwright.utils.json_values import JsonValue
from tests.unit.models.factory import (
    LLAMA_8B,
    SMALL_GPT2,
    SMALL_LLAMA,
    graph_of,
    problem_of,
    recipe_of,
)

STEP_SECONDS = 20.0
AT_2048_NODES = FailureModel(mtbf_seconds=11_135, save_seconds=2.44, restart_seconds=1_820)


def simulated(d: FailureModel, steps: int, interval: int, chance: random.Random) -> float:
    """Seconds of one training, failure by failure."""
    now, saved, fails_at = 0.0, 0, chance.expovariate(1 / d.mtbf_seconds)
    while saved < steps:
        stretch = min(interval, steps - saved)
        ends = now + stretch * STEP_SECONDS + d.save_seconds
        while fails_at < ends:
            now, ends = fails_at, fails_at + d.restart_seconds
            fails_at = now + chance.expovariate(1 / d.mtbf_seconds)
            if fails_at >= ends:  # the restart came through
                now, ends = ends, ends + stretch * STEP_SECONDS + d.save_seconds
        now, saved = ends, saved + stretch
    return now


@pytest.mark.parametrize(
    ("d", "steps", "interval"),
    [
        (AT_2048_NODES, 3_000, 11),
        (AT_2048_NODES, 3_000, 500),  # nearly every stretch fails
        (AT_2048_NODES, 1_007, 100),  # a shorter one at the end
        (
            FailureModel(mtbf_seconds=900, save_seconds=300, restart_seconds=1_200),
            300,
            17,
        ),  # restarts fail too
        (FailureModel(mtbf_seconds=1e6, save_seconds=60, restart_seconds=600), 20_000, 500),
    ],
)
def test_the_expected_time_is_that_of_simulated_failures(
    d: FailureModel, steps: int, interval: int
) -> None:
    chance = random.Random(7)
    times = [simulated(d, steps, interval, chance) for _ in range(2_000)]
    mean = math.fsum(times) / len(times)
    error = math.sqrt(math.fsum((t - mean) ** 2 for t in times)) / len(times)
    assert error < 0.007 * mean, "too few trainings to tell 2 %"
    assert expected_seconds(d, STEP_SECONDS, steps, interval).total == pytest.approx(mean, rel=0.02)


@pytest.mark.parametrize("mtbf", [2_000.0, 11_135.0, 1e6])
@pytest.mark.parametrize("save", [1.0, 60.0, 600.0])
def test_the_interval_is_next_to_the_best_one(mtbf: float, save: float) -> None:
    d, step, steps = (
        FailureModel(mtbf_seconds=mtbf, save_seconds=save, restart_seconds=900),
        1.0,
        10**7,
    )

    def total(interval: int) -> float:
        return expected_seconds(d, step, steps, interval).total

    best = min(total(interval) for interval in range(1, 100_000))
    assert total(auto_interval(d, step, steps)) <= best * 1.002


def test_young_is_the_first_term() -> None:
    """sqrt(2 d M) where a save is short beside the time between failures, M where it is longer."""
    rare = FailureModel(mtbf_seconds=1e8, save_seconds=1, restart_seconds=0)
    assert young_daly_seconds(rare) == pytest.approx(math.sqrt(2 * 1e8), rel=1e-3)
    often = FailureModel(mtbf_seconds=10, save_seconds=20, restart_seconds=0)
    assert young_daly_seconds(often) == 10
    just = dataclasses.replace(often, save_seconds=19.999)
    assert young_daly_seconds(just) == pytest.approx(8.89, abs=0.01)  # 20 (1 + 1/3 + 1/9) - 20


def test_the_interval_is_at_least_a_step_and_at_most_the_run() -> None:
    assert auto_interval(AT_2048_NODES, 1e5, 100) == 1
    assert auto_interval(AT_2048_NODES, 1e-3, 100) == 100
    assert auto_interval(AT_2048_NODES, 1.0, 0) == round(young_daly_seconds(AT_2048_NODES))


def test_the_figures_of_2048_nodes() -> None:
    """15.6 T tokens in 929,833 steps of 20.46 s, worked out by hand: 84,530 stretches of 11 steps,
    each failing with 1 - e^(-227.5 / 11135) = 2.02 %."""
    spent = expected_seconds(AT_2048_NODES, 20.46, 929_833, 11)
    days = [
        seconds / 86_400 for seconds in (spent.trained, spent.saves, spent.lost, spent.restarts)
    ]
    assert days == pytest.approx([220.19, 2.3872, 2.289, 39.93], rel=1e-3)
    assert spent.total / AT_2048_NODES.mtbf_seconds == pytest.approx(2_054, rel=1e-3)


def test_without_failures_only_the_saves_are_lost() -> None:
    never = FailureModel(mtbf_seconds=1e15, save_seconds=3, restart_seconds=600)
    spent = expected_seconds(never, 2.0, 1_001, 100)
    assert (spent.trained, spent.saves) == (2_002, 33)
    assert spent.lost == pytest.approx(0, abs=1e-6) and spent.restarts == pytest.approx(0, abs=1e-6)


def test_failures_before_every_save_never_end() -> None:
    tiny = FailureModel(mtbf_seconds=1e-3, save_seconds=3, restart_seconds=600)
    assert expected_seconds(tiny, 2.0, 100, 1).total == math.inf
    hopeless = expected_seconds(dataclasses.replace(tiny, mtbf_seconds=60.0), 2.0, 1_000, 1_000)
    assert math.isfinite(hopeless.total) and hopeless.trained / hopeless.total < 1e-6


BASE = Layout(
    tensor=2,
    pipeline=2,
    data=4,
    zero_stage=1,
    micro_batch_size=1,
    gradient_accumulation_steps=2,
    activation_checkpointing="none",
    schedule="1f1b",
    offload="none",
)


def nodes_of(
    strategy: Layout, config: dict[str, JsonValue], nodes: int, recipe: Recipe | None = None
) -> list[float]:
    problem = laid_out(strategy, config, nodes, recipe)
    layout = build_priced_layout(problem, strategy, default_constants())
    layers = len(problem.graph.layers)
    return node_checkpoint_bytes(
        with_boundaries(
            layout, tuple(layers * s // strategy.stages for s in range(strategy.stages + 1))
        )
    )


def laid_out(
    strategy: Layout, config: dict[str, JsonValue], nodes: int, recipe: Recipe | None = None
) -> Problem:
    recipe = recipe or recipe_of(config)
    cluster = dataclasses.replace(
        recipe.cluster, nodes=nodes, gpus_per_node=strategy.world_size // nodes
    )
    batch = strategy.micro_batch_size * strategy.gradient_accumulation_steps * strategy.data
    training = dataclasses.replace(recipe.training, global_batch_size=batch)
    return problem_of(
        dataclasses.replace(recipe, cluster=cluster, training=training), graph_of(config)
    )


@pytest.mark.parametrize("config", [SMALL_LLAMA, SMALL_GPT2], ids=["llama", "gpt2-tied"])
@pytest.mark.parametrize(
    "strategy",
    [
        BASE,
        dataclasses.replace(BASE, pipeline=1, data=8, zero_stage=3),
        dataclasses.replace(BASE, pipeline=1, data=8, zero_stage=0),
        dataclasses.replace(BASE, pipeline=1, data=2, context=4, zero_stage=0),
        dataclasses.replace(BASE, data=2, context=2),
        dataclasses.replace(BASE, schedule="dualpipev", gradient_accumulation_steps=4),
    ],
    ids=["pipeline", "zero-3", "zero-0", "context-zero-0", "context", "dualpipev"],
)
def test_the_nodes_write_every_element_once(strategy: Layout, config: dict[str, JsonValue]) -> None:
    nodes = nodes_of(strategy, config, 4)
    assert sum(nodes) == pytest.approx(
        OPTIMIZERS["adamw"].state_bytes * graph_of(config).total_parameters, rel=1e-12
    )
    if strategy.zero_stage == 0:  # the first data rank's node writes all of it
        assert nodes[0] == sum(nodes)
    elif strategy.zero_stage == 3:
        assert max(nodes) == pytest.approx(min(nodes), rel=1e-12)
    elif strategy.schedule == "1f1b":  # two nodes a pipeline rank
        assert nodes[0] == nodes[1] and nodes[2] == nodes[3]


def expected(
    nodes: int = 2,
    every: int | Literal["auto"] | None = None,
    measured: float | None = None,
    **cluster: object,
) -> tuple[Goodput, Recipe]:
    recipe = recipe_of(LLAMA_8B, training={"steps": 20_000}, cluster=cluster)
    recipe = dataclasses.replace(
        recipe, checkpoint=dataclasses.replace(recipe.checkpoint, every_steps=every)
    )
    strategy = dataclasses.replace(BASE, pipeline=1, data=nodes * 4, tensor=2)
    problem = laid_out(strategy, LLAMA_8B, nodes, recipe)
    _, estimate = price_planned_layout(problem, strategy, (0, len(problem.graph.layers)))
    found = goodput(problem, estimate, measured=measured)
    assert found is not None
    return found, recipe


def test_the_parts_add_up_and_auto_is_the_best() -> None:
    pinned, auto = expected(every=100)[0], expected(every="auto")[0]
    for g in (pinned, auto):
        parts = (
            g.days_without_failures,
            g.lost_to_saves_days,
            g.lost_to_failures_days,
            g.lost_to_restarts_days,
        )
        assert g.expected_days == pytest.approx(sum(part or math.nan for part in parts), rel=1e-12)
        assert g.fraction == pytest.approx((g.days_without_failures or 0) / (g.expected_days or 1))
        assert g.save_seconds == pytest.approx(
            g.checkpoint_gbytes / 2 / g.checkpoint_gbytes_per_second
        )
        assert g.worth_of_half_the_save_days is not None and g.worth_of_half_the_save_days > 0
    assert pinned.interval_steps == 100 and pinned.auto_interval_steps == auto.interval_steps
    assert pinned.auto_expected_days == auto.expected_days
    assert (auto.expected_days or 0) < (pinned.expected_days or 0)
    # A save of half the time is then right more often.
    assert (pinned.worth_of_half_the_save_days or 0) == pytest.approx(
        (pinned.lost_to_saves_days or 0) / 2, rel=0.02
    )


def test_where_the_numbers_come_from() -> None:
    constants = goodput_constants()
    default, _ = expected()
    assert (
        default.node_mtbf_hours
        == constants["node_mtbf_hours"]
        == pytest.approx(54 * 24 * 2048 / 419, abs=0.01)
    )
    assert default.cluster_mtbf_hours == default.node_mtbf_hours / 2
    assert (default.speed_from, default.checkpoint_gbytes_per_second) == ("default", 0.98)
    measured, _ = expected(measured=3.0)
    assert (measured.speed_from, measured.checkpoint_gbytes_per_second) == ("measured", 3.0)
    given, _ = expected(measured=3.0, checkpoint_gbytes_per_second=5.0, node_mtbf_hours=100.0)
    assert (given.speed_from, given.checkpoint_gbytes_per_second, given.cluster_mtbf_hours) == (
        "recipe",
        5.0,
        50.0,
    )
    assert given.save_seconds == pytest.approx(default.save_seconds * 0.98 / 5)


def test_the_words() -> None:
    often = expected(nodes=64, every=100, node_mtbf_hours=200.0)[0]
    lines = goodput_lines(often)
    assert (
        len(lines) == 3
        and "a failure every 3.12 hours" in lines[0]
        and "every 100 steps" in lines[1]
    )
    assert "half the save is worth" in lines[2]
    last = expected(nodes=64, node_mtbf_hours=0.5)[0]
    assert last.interval_steps is None and last.fraction < 1e-3
    assert goodput_lines(last)[0].startswith(
        "less than 0.1% of the time trains: a failure every 28.1 seconds"
    )
    json.dumps(dataclasses.asdict(last), allow_nan=False)


def test_epochs_know_the_share_and_not_the_days() -> None:
    strategy = dataclasses.replace(BASE, pipeline=1, data=8)
    recipe = recipe_of(LLAMA_8B, training={"steps": None, "epochs": 2.0})

    def of(every: object) -> Goodput | None:
        section = dataclasses.replace(recipe.checkpoint, every_steps=every)  # type: ignore[arg-type]
        problem = laid_out(strategy, LLAMA_8B, 2, dataclasses.replace(recipe, checkpoint=section))
        return goodput(
            problem, price_planned_layout(problem, strategy, (0, len(problem.graph.layers)))[1]
        )

    found = of("auto")
    assert of(None) is None and found is not None
    assert (
        found.expected_days is None and 0.9 < found.fraction < 1 and (found.interval_steps or 0) > 1
    )
    (words,) = goodput_lines(found)
    assert "of the time trains" in words and "auto" not in words


def copies_cost(every: int, seconds: float) -> MemoryCopyCost:
    return MemoryCopyCost(
        every_steps=every,
        node_gbytes=1.0,
        host_gbytes=4.0,
        copy_seconds=seconds,
        seconds_per_step=seconds / every,
    )


@pytest.mark.parametrize(("every", "copy", "interval"), [(1, 0.5, 100), (10, 4.0, 50)])
def test_the_expected_time_with_copies_is_that_of_simulated_failures(
    every: int, copy: float, interval: int
) -> None:
    """A failure loses the steps since the last copy; saves are work between copies."""
    d = FailureModel(mtbf_seconds=3_000, save_seconds=60, restart_seconds=200)
    steps, chance, times = 1_000, random.Random(5), []
    for _ in range(400):
        now, done, fails_at = 0.0, 0, chance.expovariate(1 / d.mtbf_seconds)
        while done < steps:
            stretch = every * STEP_SECONDS + copy
            stretch += d.save_seconds * (done // interval != (done + every) // interval)
            ends = now + stretch
            while fails_at < ends:
                now = fails_at + d.restart_seconds
                fails_at = fails_at + chance.expovariate(1 / d.mtbf_seconds)
                while fails_at < now:
                    now = fails_at + d.restart_seconds
                    fails_at = fails_at + chance.expovariate(1 / d.mtbf_seconds)
                ends = now + stretch
            now, done = ends, done + every
        times.append(now)
    found = expected_seconds_with_copies(d, STEP_SECONDS, steps, interval, copies_cost(every, copy))
    assert found.total == pytest.approx(math.fsum(times) / len(times), rel=0.02)
    assert found.saves == pytest.approx(steps / interval * 60 + steps / every * copy)
    assert found.total < expected_seconds(d, STEP_SECONDS, steps, interval).total


def with_copies(every: int | None = None, **cluster: object) -> tuple[Problem, Estimate]:
    recipe = recipe_of(LLAMA_8B, training={"steps": 20_000}, cluster=cluster)
    section = dataclasses.replace(
        recipe.checkpoint, every_steps=1000, in_memory=True, in_memory_every=every or "auto"
    )
    strategy = dataclasses.replace(BASE, pipeline=1, data=8, tensor=2)
    problem = laid_out(strategy, LLAMA_8B, 2, dataclasses.replace(recipe, checkpoint=section))
    _, estimate = price_planned_layout(problem, strategy, (0, len(problem.graph.layers)))
    return problem, estimate


def test_what_copies_in_memory_cost() -> None:
    """Half of 12 bytes a parameter on each of two nodes; two copies of it and of the peer's."""
    problem, estimate = with_copies(5)
    found = memory_copy_cost(problem, estimate)
    node = 12 * problem.graph.total_parameters / 2 / 1e9
    assert found.node_gbytes == pytest.approx(node)
    assert found.host_gbytes == pytest.approx(4 * node)
    rank = node / 8
    least = rank / goodput_constants()["memory_copy_gbytes_per_second"]
    assert least < found.copy_seconds < 1.5 * least
    assert (found.every_steps, found.seconds_per_step) == (5, found.copy_seconds / 5)
    auto = memory_copy_cost(*with_copies())
    failures = FailureModel(
        mtbf_seconds=goodput_constants()["node_mtbf_hours"] * 1800,
        save_seconds=auto.copy_seconds,
        restart_seconds=0,
    )
    step = estimate.time.step_seconds
    assert auto.every_steps == auto_interval(failures, step, 20_000)
    expected = goodput(problem, estimate)
    assert expected is not None and expected.memory == found
    (line,) = (text for text in goodput_lines(expected) if "copies in memory" in text)
    assert "every 5 steps" in line


def test_a_node_without_room_for_two_copies_is_refused() -> None:
    problem, estimate = with_copies(5, host_memory_gib=150)
    copies = memory_copy_cost(problem, estimate)
    with pytest.raises(Refusal) as caught:
        check_host_memory(problem, estimate, copies)
    (found,) = caught.value.diagnostics
    assert found.code == "SW5220" and "150.0 GiB" in found.message
    for fits in ({"host_memory_gib": 400}, {}):
        problem, estimate = with_copies(5, **fits)
        check_host_memory(problem, estimate, memory_copy_cost(problem, estimate))

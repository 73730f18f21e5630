"""Expected goodput under a supervisor: against simulated failures and repairs, and what `plan` and
`explain` say of it."""

from __future__ import annotations

import dataclasses
import json
import random
from collections import deque
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwright.cli import main as cli
from shardwright.cost.goodput import FailureModel, expected_seconds, goodput, goodput_constants
from shardwright.layout.gpu_cluster import resolve_cluster
from shardwright.layout.layout_estimate import Estimate
from shardwright.layout.planning_problem import Problem
from shardwright.recipe.recipe_types import RecoverySection
from shardwright.report.plan_sentences import recovery_lines
from shardwright.search.layout_search import choose_layout
from shardwright.search.recovery_goodput import RecoveryGoodput, recovery_goodput
from tests.unit.models.factory import SMALL_LLAMA, graph_of, recipe_of


def problem(nodes: int, batch: int, recovery: RecoverySection | None, mtbf: float) -> Problem:
    cluster = {"nodes": nodes, "gpus_per_node": 1, "node_mtbf_hours": mtbf}
    recipe = recipe_of(
        SMALL_LLAMA, cluster=cluster, training={"global_batch_size": batch, "steps": 10**7}
    )
    recipe = dataclasses.replace(
        recipe,
        checkpoint=dataclasses.replace(recipe.checkpoint, every_steps=1000),
        launch=dataclasses.replace(recipe.launch, recovery=recovery),
    )
    return Problem(
        recipe=recipe, graph=graph_of(SMALL_LLAMA), cluster=resolve_cluster(recipe.cluster)
    )


def expected(subject: Problem) -> tuple[Estimate, RecoveryGoodput]:
    estimate = choose_layout(subject)
    found = recovery_goodput(subject, estimate, goodput(subject, estimate))
    assert found is not None
    return estimate, found


@pytest.mark.parametrize(("spares", "min_nodes"), [(0, None), (1, None), (2, None), (0, 2), (1, 3)])
def test_it_is_that_of_simulated_failures_and_repairs(spares: int, min_nodes: int | None) -> None:
    """Failures come one by one; nodes are away for times of two lengths."""
    nodes, hours = 4, 24.0
    policy = RecoverySection(spares=spares, min_nodes=min_nodes)
    subject = problem(nodes, 12, policy, hours)
    estimate, found = expected(subject)
    step, constants = estimate.time.step_seconds, goodput_constants()
    assert set(found.fewer_nodes) == set(range(min_nodes or nodes, nodes))
    chance, now, lost, by_hand, slow = random.Random(3), 0.0, 0, 0, 0.0
    away: deque[float] = deque()
    mtbf = hours * 3600 / nodes
    for _ in range(60_000):
        until = now + chance.expovariate(1 / mtbf)
        while now < until:  # until the next node is back
            end = min([until, *away])
            missing = len(away) - spares
            if missing > 0 and nodes - missing in found.fewer_nodes:
                slow += (end - now) * (1 - step / found.fewer_nodes[nodes - missing])
            now = end
            away = deque(each for each in away if each > now)
        if chance.random() < constants["lost_node_share"]:
            lost += 1
            by_hand += len(away) >= spares + len(found.fewer_nodes)
            repair = constants["node_repair_hours"] * 3600
            away.append(now + repair * chance.choice((0.5, 1.5)))
    assert found.by_hand_share == pytest.approx(by_hand / lost, abs=0.01)
    share = constants["lost_node_share"] * by_hand / lost
    quick, slowly = constants["supervised_restart_seconds"], constants["restart_seconds"]
    by_hand_seconds = goodput_seconds(subject, estimate)
    restart = by_hand_seconds - (1 - share) * (slowly - quick)
    assert found.restart_seconds == pytest.approx(restart, rel=0.02)
    plain = goodput(subject, estimate)
    assert plain is not None
    failures = FailureModel(
        mtbf_seconds=mtbf, save_seconds=plain.save_seconds, restart_seconds=restart
    )
    seconds = expected_seconds(failures, step, 10**7, 1000)
    fraction = seconds.trained / seconds.total * (1 - slow / now)
    assert found.fraction == pytest.approx(fraction, rel=0.005)
    assert found.fraction_by_hand == plain.fraction
    assert found.fraction_with_a_spare > found.fraction


def goodput_seconds(subject: Problem, estimate: Estimate) -> float:
    found = goodput(subject, estimate)
    assert found is not None
    return found.restart_seconds


def test_numbers_of_nodes_that_cannot_be_planned() -> None:
    """Twelve sequences are not shared out over eleven ranks, nor are the layers or heads."""
    _, found = expected(problem(12, 12, RecoverySection(min_nodes=11), 24.0))
    assert not found.fewer_nodes and set(found.unplannable) == {11}
    assert "no plan for 11 nodes: SW" in recovery_lines(found)[2]
    assert found.by_hand_share == 1.0


def test_where_nothing_restarts_it() -> None:
    subject = problem(2, 12, None, 24.0)
    estimate = choose_layout(subject)
    plain = goodput(subject, estimate)
    slurm = dataclasses.replace(subject.recipe.launch, launcher="slurm")
    scheduled = dataclasses.replace(
        subject, recipe=dataclasses.replace(subject.recipe, launch=slurm)
    )
    assert recovery_goodput(scheduled, estimate, plain) is None
    assert recovery_goodput(subject, estimate, None) is None
    found = recovery_goodput(subject, estimate, plain)
    assert found is not None and not found.is_configured and not recovery_lines(found)


def test_the_commands_say_it(
    write_recipe: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {
        "cluster.nodes": 2,
        "cluster.gpus_per_node": 2,
        "cluster.node_mtbf_hours": 1.0,
        "checkpoint.every_steps": 2,
        "launch": {"recovery": {"min_nodes": 1}},
    }
    path = write_recipe(changes)
    for arguments in (["plan", str(path)], ["plan", str(path), "--wide"], ["estimate", str(path)]):
        assert cli.main(arguments) == 0
        text = " ".join(capsys.readouterr().out.split())
        assert "`run --supervise` (0 spare hosts, planned again for 1 nodes)" in text
    assert cli.main(["plan", str(path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["recovery"]["fewer_nodes"]["1"] > 0
    assert document["recovery"]["fraction_by_hand"] == document["goodput"]["fraction"]
    out = tmp_path / "out"
    assert cli.main(["compile", str(path), "-o", str(out)]) == 0
    capsys.readouterr()
    assert cli.main(["explain", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["recovery"] == document["recovery"]

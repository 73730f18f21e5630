"""Decide what follows an attempt, in a table of causes, histories and hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from shardwright.recipe.recipe_types import RecoverySection
from shardwright.supervise.recovery_decision import (
    EndedAttempt,
    choose_hosts,
    decide,
    is_same_failure,
    restarts_without_progress,
)

POLICY = RecoverySection(retries=2, min_nodes=1)
HOSTS = ("a", "b", "c")
RANK = EndedAttempt(cause="rank", host="b", rank=1, step=5, saved=4, nodes=3, hosts=HOSTS)
HOST = replace(RANK, cause="host", rank=None)
EARLIER = replace(RANK, step=3, saved=2)


def decided(
    history: Sequence[EndedAttempt],
    alive: Sequence[str] | None = HOSTS,
    policy: RecoverySection = POLICY,
    plannable: Sequence[int] = (1, 2),
) -> tuple[str, int, tuple[str, ...]]:
    found = decide(policy, 3, history, alive, set(plannable).__contains__)
    assert found.reason or found.action != "stop"
    return found.action, found.nodes, found.hosts


@pytest.mark.parametrize(
    ("history", "alive", "expected"),
    [
        ([RANK], HOSTS, ("restart", 3, HOSTS)),
        ([RANK], (*HOSTS, "s"), ("restart", 3, HOSTS)),
        ([HOST], ("a", "c", "s"), ("spare", 3, ("a", "c", "s"))),
        ([HOST], ("a", "c"), ("fewer", 2, ("a", "c"))),
        ([HOST], ("c",), ("fewer", 1, ("c",))),
        ([HOST], (), ("wait", 3, ())),
        ([HOST], HOSTS, ("restart", 3, HOSTS)),  # only its network was away
        # Smaller attempts: the same hosts again, or all of them.
        ([replace(RANK, nodes=2, hosts=("a", "c"))], ("a", "c"), ("restart", 2, ("a", "c"))),
        ([replace(RANK, nodes=2, hosts=("a", "c"))], HOSTS, ("more", 3, HOSTS)),
        # Two failures in a row on one host: a spare host is preferred to it.
        ([EARLIER, RANK], (*HOSTS, "s"), ("spare", 3, ("a", "c", "s"))),
        ([EARLIER, RANK], HOSTS, ("restart", 3, HOSTS)),
        # The same twice at one step ends the run, whatever the hosts.
        ([RANK, RANK], HOSTS, ("stop", 3, ())),
        ([HOST, HOST], ("a", "c"), ("stop", 3, ())),
        ([HOST, replace(HOST, host="c")], ("a", "b"), ("fewer", 2, ("a", "b"))),
        ([RANK, replace(RANK, rank=0)], HOSTS, ("restart", 3, HOSTS)),
        ([RANK, replace(RANK, error="KeyError")], HOSTS, ("restart", 3, HOSTS)),
        # A storm: the third attempt without a newer checkpoint.
        ([replace(RANK, step=k) for k in (5, 6, 7)], HOSTS, ("stop", 3, ())),
        ([EARLIER, *(replace(RANK, step=k) for k in (5, 6))], HOSTS, ("restart", 3, HOSTS)),
        # Ends.
        ([replace(RANK, cause="done")], HOSTS, ("stop", 3, ())),
        ([replace(RANK, cause="stopped")], HOSTS, ("stop", 3, ())),
        ([replace(RANK, cause="refused")], HOSTS, ("stop", 3, ())),
        ([replace(RANK, cause="disk")], HOSTS, ("stop", 3, ())),
        ([replace(RANK, cause="preemption")] * 2, HOSTS, ("restart", 3, HOSTS)),
        ([replace(RANK, cause="hang")], HOSTS, ("restart", 3, HOSTS)),
        ([replace(RANK, cause="nonfinite")], HOSTS, ("restart", 3, HOSTS)),
        ([replace(RANK, cause="nonfinite", error="SW6311")] * 2, HOSTS, ("stop", 3, ())),
        # A launcher without host names.
        ([RANK], None, ("restart", 3, ())),
    ],
)
def test_decisions(
    history: list[EndedAttempt],
    alive: tuple[str, ...] | None,
    expected: tuple[str, int, tuple[str, ...]],
) -> None:
    assert decided(history, alive) == expected


def test_the_recipe_limits_it() -> None:
    assert decided([RANK], policy=replace(POLICY, on=("host",)))[0] == "stop"
    assert decided([RANK], policy=replace(POLICY, retries=0))[0] == "stop"
    assert decided([HOST], ("a", "c"), replace(POLICY, min_nodes=None))[0] == "wait"
    assert decided([HOST], ("a",), replace(POLICY, min_nodes=2))[0] == "wait"
    # Two nodes cannot be planned: one can, or none.
    assert decided([HOST], ("a", "c"), plannable=[1]) == ("fewer", 1, ("a",))
    unplannable = decide(POLICY, 3, [HOST], ("a", "c"), lambda _: False)
    assert unplannable.action == "wait" and "cannot be planned" in unplannable.reason


def test_a_batch_that_failed_twice_is_skipped() -> None:
    """As often as the recipe allows, and only where the step is known."""
    bad = replace(RANK, cause="nonfinite", error="SW6311", step=5, bad_step=3)
    policy = replace(POLICY, skip_batches=1, retries=1)
    found = decide(policy, 3, [bad, bad], HOSTS, lambda _: True)
    assert (found.action, found.skips, found.hosts) == ("restart", 3, HOSTS)
    assert decide(policy, 3, [bad, bad], ("a", "c"), lambda _: True).action == "fewer"
    assert decide(policy, 3, [bad], HOSTS, lambda _: True).skips is None
    ended = decide(policy, 3, [bad, bad], HOSTS, lambda _: True, skipped=1)
    assert ended.action == "stop" and "1 batches are skipped" in ended.reason
    unknown = replace(bad, bad_step=None)
    assert decide(policy, 3, [unknown, unknown], HOSTS, lambda _: True).action == "stop"
    assert decide(policy, 3, [RANK, RANK], HOSTS, lambda _: True).action == "stop"
    assert decide(POLICY, 3, [bad, bad], HOSTS, lambda _: True).action == "stop"


def test_before_the_first_attempt() -> None:
    assert choose_hosts(POLICY, 3, [], HOSTS, lambda _: True).action == "restart"
    fewer = choose_hosts(POLICY, 3, [], ("a", "b"), lambda _: True)
    assert (fewer.action, fewer.nodes) == ("fewer", 2)


def test_what_is_the_same_failure() -> None:
    own = replace(RANK, error="ValueError")
    assert is_same_failure(own, replace(own, rank=7, host="c"))  # every rank may meet it first
    assert not is_same_failure(own, replace(own, step=6))
    assert not is_same_failure(replace(RANK, cause="preemption"), replace(RANK, cause="preemption"))
    assert restarts_without_progress([EARLIER, RANK, RANK]) == 2

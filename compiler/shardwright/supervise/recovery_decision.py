"""Decide what follows an attempt that ended early: a pure function of causes, history and hosts
(compiler/decisions/050-supervisor.md)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from shardwright.recipe.recipe_types import RecoverySection

Action = Literal["restart", "spare", "fewer", "more", "wait", "stop"]
"""restart: on the same hosts. spare: on as many, of which some are others. fewer: planned again for
the hosts that are left. more: back on all nodes of the plan. wait: for a host to return. stop: the
run has ended, or a restart would not help."""

FINAL_CAUSES = {
    "done": "the run is done",
    "stopped": "the run was asked to stop",
    "refused": "every start would be refused",
    "disk": "a restart would fill the disk again",
}
"""Causes that no restart follows, whatever the recipe says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedAttempt:
    """Describe an attempt that ended.

    cause: as monitor/attempt_records.end_cause has it
    host, rank: of the failure, None where it names none
    step: the last one trained
    saved: the newest checkpoint's step, 0 without one
    error: the first words of the failure, which tell two errors apart
    hosts: those that it ran on, () where they have no names
    bad_step: the first step of those in a row whose loss or gradient was not finite, where that is
        the cause
    """

    cause: str
    host: str | None = None
    rank: int | None = None
    step: int = 0
    saved: int = 0
    error: str = ""
    nodes: int = 1
    hosts: tuple[str, ...] = ()
    bad_step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Hold what is next. hosts: () where they have no names. reason: for people. skips: the step
    whose batch is left out from now on, None for none."""

    action: Action
    nodes: int
    hosts: tuple[str, ...] = ()
    reason: str = ""
    skips: int | None = None


def decide(
    policy: RecoverySection,
    nodes: int,
    history: Sequence[EndedAttempt],
    alive: Sequence[str] | None,
    can_plan: Callable[[int], bool],
    skipped: int = 0,
) -> Decision:
    """Return what follows the last attempt of `history`.

    nodes: the plan's
    alive: hosts that can be reached, in the hostfile's order, spares last; None where the launcher
        names no hosts
    can_plan: whether the recipe can be planned again for fewer nodes
    skipped: batches that are left out by now
    """
    last = history[-1]
    if last.cause in FINAL_CAUSES:
        return Decision(action="stop", nodes=last.nodes, reason=FINAL_CAUSES[last.cause])
    if last.cause not in policy.on:
        reason = f"launch.recovery.on does not name `{last.cause}`"
        return Decision(action="stop", nodes=last.nodes, reason=reason)
    if len(history) > 1 and is_same_failure(history[-2], last):
        if last.bad_step is not None and skipped < policy.skip_batches:
            chosen = choose_hosts(policy, nodes, history, alive, can_plan)
            return replace(chosen, skips=last.bad_step)
        reason = f"two attempts in a row ended by the same cause after step {last.step}"
        if last.bad_step is not None and policy.skip_batches:
            reason += f"; {policy.skip_batches} batches are skipped, as launch.recovery allows"
        return Decision(action="stop", nodes=last.nodes, reason=reason)
    if (tries := restarts_without_progress(history)) > policy.retries:
        without = f"{policy.retries} restarts" if policy.retries != 1 else "1 restart"
        reason = f"{without} in a row made no newer checkpoint (launch.recovery.retries)"
        if not policy.retries:
            reason = "launch.recovery.retries is 0"
        return Decision(action="stop", nodes=last.nodes, reason=reason)
    assert tries <= policy.retries
    return choose_hosts(policy, nodes, history, alive, can_plan)


def is_same_failure(one: EndedAttempt, other: EndedAttempt) -> bool:
    """Return whether two attempts ended at one step by one cause: a lost host by its name, a killed
    rank by its number, any other by its error."""
    if (one.cause, one.step) != (other.cause, other.step) or one.cause == "preemption":
        return False
    if one.cause == "host":
        return one.host == other.host
    return one.error == other.error and (bool(one.error) or one.rank == other.rank)


def restarts_without_progress(history: Sequence[EndedAttempt]) -> int:
    """Return how many of the newest attempts ended with the same newest checkpoint."""
    newest = history[-1].saved
    count = 0
    for each in reversed(history):
        if each.saved != newest:
            break
        count += 1
    return count


def choose_hosts(
    policy: RecoverySection,
    nodes: int,
    history: Sequence[EndedAttempt],
    alive: Sequence[str] | None,
    can_plan: Callable[[int], bool],
) -> Decision:
    """Return where the next attempt runs; `history` is empty before the first one."""
    last = history[-1] if history else None
    if alive is None:
        return Decision(action="restart", nodes=nodes)
    hosts = tuple(sorted(alive, key=lambda host: host == _unreliable_host(history)))
    if len(hosts) >= nodes:
        chosen = tuple(host for host in alive if host in hosts[:nodes])
        if last is not None and last.nodes < nodes:
            action: Action = "more"
        elif last is not None and set(chosen) != set(last.hosts):
            action = "spare"
        else:
            action = "restart"
        return Decision(action=action, nodes=nodes, hosts=chosen)
    fewest = nodes if policy.min_nodes is None else policy.min_nodes
    for count in range(len(hosts), fewest - 1, -1):
        if can_plan(count):
            chosen = tuple(alive)[:count]
            same = last is not None and (last.nodes, set(last.hosts)) == (count, set(chosen))
            return Decision(action="restart" if same else "fewer", nodes=count, hosts=chosen)
    few = f"{len(hosts)} of {nodes} hosts can be reached"
    reason = f"{few}, and launch.recovery.min_nodes is {fewest}"
    if len(hosts) >= fewest:
        reason = f"{few}, and the recipe cannot be planned for {fewest} to {len(hosts)} nodes"
    return Decision(action="wait", nodes=nodes, reason=reason)


def _unreliable_host(history: Sequence[EndedAttempt]) -> str | None:
    """Return the host on which the last two attempts failed; a spare host is preferred to it."""
    if len(history) < 2 or history[-1].host is None:
        return None
    return history[-1].host if history[-1].host == history[-2].host else None

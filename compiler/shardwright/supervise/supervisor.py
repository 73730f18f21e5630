"""`run --supervise`: start attempts through `run` until the run is done or a restart would not help
(compiler/decisions/050-supervisor.md). No torch."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwright.checkpoint.checkpoint_storage import parse_step, published_steps, step_name
from shardwright.checkpoint.resume_checkpoint import checkpoint_root
from shardwright.diagnostics import refusal
from shardwright.launch.launcher_process import Supervision, run_folder
from shardwright.launch.launchers.launcher_table import LAUNCHERS
from shardwright.launch.preflight_checks import read_hosts_and_spares
from shardwright.monitor.attempt_records import (
    ATTEMPTS_FILE,
    end_cause,
    read_attempts,
    read_step_times,
)
from shardwright.monitor.rank_events import RunStalled, read_events
from shardwright.monitor.run_files import (
    read_attempt_record,
    read_json,
    read_status,
    refresh_attempts,
)
from shardwright.monitor.skipped_batches import (
    SkippedBatch,
    add_skipped_batch,
    read_skipped_batches,
)
from shardwright.plan.plan import Plan, load_plan
from shardwright.recipe.recipe_types import RecoverySection
from shardwright.supervise.failed_batch import batch_text, first_nonfinite_step
from shardwright.supervise.fewer_nodes import FewerNodes, unplannable_text
from shardwright.supervise.reachable_hosts import HostPool, SshHosts
from shardwright.supervise.recovery_decision import (
    Decision,
    EndedAttempt,
    choose_hosts,
    decide,
    is_same_failure,
    restarts_without_progress,
)
from shardwright.supervise.slurm_allocation import SlurmAllocation
from shardwright.train.run_attempt import RANKS, SUPERVISOR_STOP, hold_supervisor_lease
from shardwright.utils.json_lines import append_line
from shardwright.utils.run_lease import is_locked_by_run, lease_owner

ORPHAN_SECONDS = 90.0
"""Limits the wait for the ranks of a supervisor that was killed; they end themselves."""
HOST_WAIT_SECONDS = 600.0
"""Limits the wait for a host, where fewer than min_nodes are left."""
MAX_DELAY_SECONDS = 30.0
MAX_COUNTS_CHECKED = 4
"""Numbers of nodes, the largest first, whose plans are searched before the first attempt."""
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(?=: )")


def supervise(folder: Path, hostfile: Path | None, resume: str) -> int:
    """Run a compiled folder, and again where it ends early. Returns the exit code of `run`."""
    plan = load_plan(folder)
    _check_launcher(plan)
    if LAUNCHERS[plan.launch.launcher].submits:
        return run_folder(folder, hostfile, resume)  # the job supervises itself
    (folder / "run").mkdir(exist_ok=True)
    with hold_supervisor_lease(folder):
        (folder / SUPERVISOR_STOP).unlink(missing_ok=True)
        _await_orphans(folder)
        return _Supervisor(plan, folder, hostfile, resume).run()


def _check_launcher(plan: Plan) -> None:
    launcher = LAUNCHERS[plan.launch.launcher]
    if launcher.submits and launcher.restarts_in_allocation and plan.launch.recovery is None:
        raise refusal(
            "SW5214",
            f"--supervise: the plan has no `launch.recovery`, so its {launcher.name} job restarts "
            "nothing",
            "Write `recovery: {}` under `launch` in the recipe and compile again, or leave "
            "--supervise out.",
        )
    if not launcher.can_restart:
        raise refusal(
            "SW5214",
            f"--supervise: {launcher.name} starts the nodes elsewhere, so nothing here restarts "
            "them",
            "Leave --supervise out: docs/launching.md says how this launcher restarts a run.",
        )
    if plan.islands > 1:
        raise refusal(
            "SW5214",
            "--supervise does not restart islands: each one ends by itself",
            "Leave --supervise out, and start an island that ended again.",
        )


def _await_orphans(folder: Path) -> None:
    """Wait for the launcher of a supervisor that was killed."""
    end = time.monotonic() + ORPHAN_SECONDS
    if is_locked_by_run(folder):
        print("waiting for the ranks of the last supervisor to end", file=sys.stderr, flush=True)
    while is_locked_by_run(folder) and time.monotonic() < end:
        time.sleep(0.5)


class _Supervisor:
    """Holds the state of one `run --supervise`. hosts: None where the launcher names none. names:
    what each host calls itself -> its name in the hostfile or under Slurm."""

    def __init__(self, plan: Plan, folder: Path, hostfile: Path | None, resume: str) -> None:
        self.plan, self.folder, self.resume = plan, folder, resume
        self.policy = plan.launch.recovery or RecoverySection()
        self.hosts = _host_pool(plan, folder, hostfile)
        self.fewer = FewerNodes(plan, folder)
        self.names: dict[str, str] = {}
        self.history: list[EndedAttempt] = []
        self.stop_requested = threading.Event()
        self.returned = threading.Event()
        self.ended_ranks: str | None = None
        self.lacks_hosts = False

    def run(self) -> int:
        with self._signals():
            self._warn_unplannable()
            decision, code = self._await_hosts(self._choose()), 3
            if decision.action == "fewer":
                few = f"{len(decision.hosts)} of {self.plan.nodes} hosts can be reached"
                print(f"recovery     {few}: {_step_text(decision)}", flush=True)
            while decision.action != "stop" and not self._is_stopped():
                number = read_attempt_record(self.folder).number
                code = self._start(decision)
                attempts = read_attempts(self.folder)
                if not attempts or attempts[-1]["attempt"] == number:
                    return code  # trained to its last step before
                decision = self._next(attempts[-1], decision, code)
            if decision.action == "stop":
                self._print_end(decision)
            if self.lacks_hosts and self.hosts is not None:
                return self.hosts.exit_code_without_hosts
            return code

    def _choose(self) -> Decision:
        return choose_hosts(
            self.policy, self.plan.nodes, self.history, self._alive(), self.fewer.can_plan
        )

    def _start(self, decision: Decision) -> int:
        """Run one attempt; return its exit code."""
        folder = self.folder
        if decision.nodes < self.plan.nodes:
            folder = self.fewer.compile(decision.nodes)
        ended = threading.Event()
        self.returned.clear()
        if decision.nodes < self.plan.nodes:
            watch = threading.Thread(
                target=self._watch_for_return, args=(decision.hosts, ended), daemon=True
            )
            watch.start()
        try:
            return run_folder(
                folder,
                None if self.hosts is None else self.hosts.bind(decision.hosts),
                self.resume,
                Supervision(
                    ends_on_stall="hang" in self.policy.on,
                    stop_requested=self.stop_requested,
                    ended_ranks=self.ended_ranks,
                ),
            )
        finally:
            ended.set()

    def _next(self, attempt: dict[str, Any], ran: Decision, code: int) -> Decision:
        """Classify how the attempt ended, decide what follows, and write both down."""
        start, end = attempt["start"] or {}, attempt["end"] or self._unwritten_end()
        began = time.monotonic()
        reached: dict[str, str] | None = None
        lost: list[str] = []
        is_preempted = False
        if self.hosts is not None and end.get("outcome") != "done":
            is_preempted = self.hosts.is_preempted()
            self.hosts.end_attempt()
            reached = self._reach()
            lost = [host for host in ran.hosts if host not in reached]
        self.ended_ranks = self._lease_of_ended_ranks(lost)
        own_stop = self.returned.is_set()  # run/stop is the supervisor's
        stopped = (
            self._is_stopped() or is_preempted or (bool(end.get("stop_requested")) and not own_stop)
        )
        cause = end_cause({**end, "stop_requested": stopped}, lost)
        if code == 1:
            cause = "refused"
        grows = cause == "preemption" and own_stop
        host = lost[0] if cause == "host" else end.get("host")
        host = self.names.get(str(host), host)
        error = _EXCEPTION.match(str(end.get("cause") or ""))
        saved = parse_step(str(end.get("checkpoint"))) or 0
        if saved > (start.get("step") or 0) or self.plan.checkpoint.in_memory:
            self.resume = "auto"
        ended = EndedAttempt(
            cause=cause,
            host=host,
            rank=end.get("rank"),
            step=end.get("step") or 0,
            saved=max(saved, start.get("step") or 0),  # a copy in memory is progress too
            error=str(end.get("code")) if cause == "nonfinite" else error[0] if error else "",
            nodes=ran.nodes,
            hosts=ran.hosts,
            bad_step=first_nonfinite_step(self.plan, self.folder) if cause == "nonfinite" else None,
        )
        alive = None if reached is None else list(reached)
        if grows:
            decision = choose_hosts(
                self.policy, self.plan.nodes, [ended], alive, self.fewer.can_plan
            )
        else:
            self.history.append(ended)
            decision = decide(
                self.policy,
                self.plan.nodes,
                self.history,
                alive,
                self.fewer.can_plan,
                len(read_skipped_batches(self.folder)),
            )
        if decision.skips is not None:
            decision = self._skip_batch(decision, decision.skips)
        if cause == "hang" and decision.action != "stop":
            self._kill_suspects(ran)
        self._record(attempt["attempt"], "return" if grows else cause, ended, decision, began)
        self._print_decision(ended, decision, grows=grows)
        if decision.action == "wait":
            decision = self._await_hosts(decision)
        elif decision.action != "stop" and not grows:
            tries = restarts_without_progress(self.history)
            if tries > 1:
                self.stop_requested.wait(min(MAX_DELAY_SECONDS, 2.0**tries))
        return decision

    def _skip_batch(self, decision: Decision, step: int) -> Decision:
        """Leave a step's batch out from the next attempt on; return the decision that says so."""
        rows = batch_text(self.plan, self.folder, step)
        add_skipped_batch(self.folder, SkippedBatch(step=step, rows=rows or None))
        if self.resume == "never":  # the list is this run's, and so are all checkpoints by now
            self.resume = "auto"
        skipped = f"the batch of step {step} is skipped from now on"
        return replace(decision, reason=f"{skipped}: {rows}" if rows else skipped)

    def _unwritten_end(self) -> dict[str, Any]:
        """Return the end of an attempt whose line a full disk did not take, from run/status.json,
        which is written in place then."""
        status = read_status(self.folder)
        steps, saved = read_step_times(self.folder), self._newest_checkpoint()
        number = read_attempt_record(self.folder).number or 0
        return {
            "outcome": status.status
            if status.status in ("done", "preempted", "failed")
            else "lost",
            "code": status.code,
            "cause": status.cause,
            "rank": status.rank,
            "host": status.host,
            "step": steps[number].last_step if number in steps else None,
            "checkpoint": step_name(saved) if saved else None,
        }

    def _lease_of_ended_ranks(self, lost: list[str]) -> str | None:
        """Return the token of the lease that the attempt's rank 0 left. Its launcher has ended, and
        so have the ranks of hosts that answer; a lost host may still run rank 0."""
        owner = lease_owner(self.folder / "run" / "lease")
        if owner is None or owner.role != RANKS or self.names.get(owner.host) in lost:
            return None
        is_known = self.hosts is None or owner.host in self.names
        return owner.token if is_known else None

    # The hosts.

    def _reach(self) -> dict[str, str]:
        assert self.hosts is not None
        reached = self.hosts.reach(self.hosts.names())
        self.names |= {own: name for name, own in reached.items()}
        return reached

    def _alive(self) -> list[str] | None:
        return None if self.hosts is None else list(self._reach())

    @property
    def _fewest(self) -> int:
        return self.plan.nodes if self.policy.min_nodes is None else self.policy.min_nodes

    def _await_hosts(self, decision: Decision) -> Decision:
        """Wait until enough hosts can be reached, for HOST_WAIT_SECONDS at most."""
        end = time.monotonic() + HOST_WAIT_SECONDS
        if decision.action == "wait":
            print(f"recovery     waiting: {decision.reason}", flush=True)
        while decision.action == "wait" and not self._is_stopped():
            assert self.hosts is not None
            if time.monotonic() > end or len(self.hosts.names()) < self._fewest:
                self.lacks_hosts = True
                return Decision(action="stop", nodes=decision.nodes, reason=decision.reason)
            self.stop_requested.wait(self.hosts.poll_seconds)
            decision = self._choose()
        return decision

    def _watch_for_return(self, used: tuple[str, ...], ended: threading.Event) -> None:
        """End a smaller attempt after its next checkpoint, once all nodes can be had again."""
        assert self.hosts is not None
        while not ended.wait(self.hosts.poll_seconds):
            others = [name for name in self.hosts.names() if name not in used]
            lacking = self.plan.nodes - len(used)
            if len(others) >= lacking and len(self.hosts.reach(others)) >= lacking:
                break
        before = self._newest_checkpoint()
        while self.plan.checkpoint.every_steps is not None and not ended.wait(0.5):
            if self._newest_checkpoint() > before:
                break
        if not ended.is_set() and not self._is_stopped():
            self.returned.set()
            (self.folder / "run" / "stop").touch()

    def _newest_checkpoint(self) -> int:
        steps = published_steps(checkpoint_root(self.plan, self.folder))
        return steps[-1][0] if steps else 0

    def _kill_suspects(self, ran: Decision) -> None:
        """Kill ranks on other hosts that do not answer: a stopped process ends by nothing else."""
        if self.hosts is None:
            return
        try:
            log = (self.folder / "run" / "launcher.log").read_text(errors="replace")
        except OSError:
            return
        events = read_events(log.splitlines())
        stalls = [event for event in events if isinstance(event, RunStalled)]
        for rank in stalls[-1].ranks if stalls else ():
            record = read_json(self.folder / "run" / "ranks" / f"rank-{rank:05d}.json")
            name, pid = self.names.get(str(record.get("host"))), record.get("pid")
            if name is not None and isinstance(pid, int):
                place = self.folder
                if ran.nodes < self.plan.nodes:
                    place = self.fewer.compile(ran.nodes)
                self.hosts.kill_rank(name, pid, place)

    # What people and other commands are told.

    def _warn_unplannable(self) -> None:
        counts = range(self.plan.nodes - 1, self._fewest - 1, -1)[:MAX_COUNTS_CHECKED]
        for nodes in counts if self.hosts is not None else ():
            if not self.fewer.can_plan(nodes):
                text = unplannable_text(nodes, self.fewer.refusals[nodes])
                print(f"warning[SW6325]: {text}", file=sys.stderr, flush=True)

    def _record(
        self, number: int, cause: str, ended: EndedAttempt, decision: Decision, began: float
    ) -> None:
        line: dict[str, Any] = {
            "event": "recovery",
            "attempt": number,
            "time": time.time(),
            "cause": cause,
            "host": ended.host,
            "rank": ended.rank,
            "step": ended.step,
            "action": decision.action,
            "nodes": decision.nodes,
            "hosts": list(decision.hosts) or None,
            "reason": decision.reason or None,
            "skipped_step": decision.skips,
            "decision_seconds": round(time.monotonic() - began, 3),
        }
        with contextlib.suppress(OSError):  # a full disk
            append_line(self.folder / ATTEMPTS_FILE, line)
            refresh_attempts(self.folder)

    def _print_decision(self, ended: EndedAttempt, decision: Decision, *, grows: bool) -> None:
        if decision.action in ("stop", "wait"):
            return
        why = "a host has returned" if grows else _cause_text(ended)
        print(f"recovery     {why} after step {ended.step}: {_step_text(decision)}", flush=True)
        if decision.skips is not None:
            print(f"recovery     {decision.reason}", flush=True)

    def _print_end(self, decision: Decision) -> None:
        last = self.history[-1] if self.history else None
        if last is not None and last.cause in ("done", "stopped", "refused"):
            return
        what = "the run cannot start" if last is None else f"{_cause_text(last)}"
        text = f"the supervised run is given up: {what}; {decision.reason}"
        print(f"error[SW6324]: {text}", file=sys.stderr)
        twice = len(self.history) > 1 and is_same_failure(self.history[-2], self.history[-1])
        if last is not None and last.cause in ("rank", "nonfinite", "hang") and twice:
            step = (last.bad_step if last.cause == "nonfinite" else None) or (last.step + 1)
            if batch := batch_text(self.plan, self.folder, step):
                print(f"  {batch}", file=sys.stderr)
        place = self.folder
        print(
            f"  `shardwright autopsy {place}` tells what happened and what to do", file=sys.stderr
        )

    # Requests to stop.

    def _is_stopped(self) -> bool:
        return self.stop_requested.is_set() or (self.folder / SUPERVISOR_STOP).exists()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and SIGUSR1 end the run between two attempts too."""

        def stop(*_: object) -> None:
            self.stop_requested.set()

        previous = {s: signal.signal(s, stop) for s in (signal.SIGUSR1, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def _step_text(decision: Decision) -> str:
    """Return what is done next, in a few words."""
    where = f" on {', '.join(decision.hosts)}" if decision.hosts else ""
    nodes = f"{decision.nodes} node{'' if decision.nodes == 1 else 's'}"
    what = {
        "restart": "restarting",
        "spare": "restarting with another host",
        "fewer": f"planning again for {nodes}",
        "more": f"back to {nodes}",
    }[decision.action]
    return what + where


def _cause_text(ended: EndedAttempt) -> str:
    """Return why an attempt ended, in a few words."""
    host = f" on host {ended.host}" if ended.host else ""
    rank = "a rank" if ended.rank is None else f"rank {ended.rank}"
    return {
        "host": f"host {ended.host} was lost",
        "rank": f"{rank}{host} failed{f' ({ended.error})' if ended.error else ''}",
        "hang": f"the run hung at {rank}{host}",
        "preemption": "a preemption notice came",
        "nonfinite": "the loss was not finite",
        "disk": f"a disk was full{host}",
    }.get(ended.cause, ended.cause)


def _host_pool(plan: Plan, folder: Path, hostfile: Path | None) -> HostPool | None:
    """Return the hosts of the run; None where the launcher names none. Raises Refusal."""
    if LAUNCHERS[plan.launch.launcher].restarts_in_allocation:
        return SlurmAllocation(folder)
    if not LAUNCHERS[plan.launch.launcher].uses_hostfile:
        return None
    if shutil.which("ssh") is None:
        raise refusal(
            "SW5301",
            "--supervise asks hosts over ssh, and this machine has no `ssh` command",
            "Install an ssh client (openssh-client).",
        )
    return SshHosts(read_hosts_and_spares(plan, folder, hostfile), folder)

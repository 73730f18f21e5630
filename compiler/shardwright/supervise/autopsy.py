"""Explain a run's attempts from the files that they left: what happened, who failed first, what the
others waited for, what was tried, what it cost, and what to do. No torch."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.checkpoint.run_attempts import ATTEMPTS_FOLDER
from shardwright.launch.run_state import read_state
from shardwright.monitor.attempt_records import (
    AttemptSummary,
    RunCost,
    attempt_summaries,
    cost_text,
    read_attempts,
    run_cost,
)
from shardwright.monitor.rank_events import (
    COLLECTIVE_FILES,
    RankFailed,
    RankLost,
    RunStalled,
    first_failure,
    is_secondary_failure,
    read_events,
)
from shardwright.plan.plan import Plan
from shardwright.supervise.failed_batch import batch_text, first_nonfinite_step
from shardwright.utils.number_format import format_number

MAX_RANKS = 8
MAX_ATTEMPTS = 12
TRACEBACK_LINES = 6
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')

ADVICE: Mapping[str, str] = {
    "host": (
        "check the host's power, its network and `ssh {host} true`; give `launch.recovery` spare "
        "hosts or a smaller min_nodes, and it is replaced without you"
    ),
    "rank": (
        "read the rank's error above and its log; a rank that was killed most often ran out of "
        "host memory (`dmesg` on its host)"
    ),
    "hang": (
        "look at the suspect's stack above: a rank outside every collective is stuck in its own "
        "code, its disk or its GPU; where it is one host each time, take that host out"
    ),
    "preemption": "nothing: the checkpoint after the notice is whole",
    "nonfinite": (
        "look at the rows below; lower training.optimizer.lr or lengthen the warm-up where the "
        "step changes with the learning rate, and remove the rows where it does not, or set "
        "launch.recovery.skip_batches"
    ),
    "disk": "make room on the disk that is named above, or set checkpoint.keep",
    "refused": "do what the message asks for: no restart changes it",
    "stopped": "nothing: the run was asked to stop",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Autopsy:
    """Hold what the files of a run tell.

    failure: of the newest attempt that failed; {} where none did
    waits: what the other ranks did then, a line each
    tried: what followed each attempt
    """

    status: str
    step: int
    steps: int
    attempts: Sequence[AttemptSummary]
    failure: Mapping[str, Any]
    waits: Sequence[str]
    tried: Sequence[str]
    cost: RunCost
    repeated_steps: int
    advice: Sequence[str]


def read_autopsy(plan: Plan, folder: Path) -> Autopsy:
    """Read the attempts of a compiled folder."""
    state, lines = read_state(plan, folder), read_attempts(folder)
    attempts = attempt_summaries(folder)
    failed = next((a for a in reversed(attempts) if a.cause not in (None, "return")), None)
    failure: dict[str, Any] = {}
    waits: list[str] = []
    if failed is not None:
        place = _evidence(folder, failed.number)
        failure, waits = _read_failure(place, failed)
        record = next(each for each in lines if each["attempt"] == failed.number)
        failure["message"] = failure.get("message") or (record["end"] or {}).get("cause")
    return Autopsy(
        status=state.status,
        step=state.step,
        steps=state.steps,
        attempts=attempts,
        failure=failure,
        waits=waits,
        tried=_tried(lines),
        cost=run_cost(folder),
        repeated_steps=sum(
            max(0, (a.ended_step or 0) - (b.started_step or 0))
            for a, b in itertools.pairwise(attempts)
        ),
        advice=_advice(plan, folder, failed, failure, state.help),
    )


def _evidence(folder: Path, number: int) -> Path:
    """Return where the attempt's files are: run/ itself until the next attempt moves them."""
    kept = folder / ATTEMPTS_FOLDER / str(number)
    return kept if kept.is_dir() else folder / "run"


def _read_failure(place: Path, failed: AttemptSummary) -> tuple[dict[str, Any], list[str]]:
    """Return the first failure of an attempt, and what the other ranks did."""
    try:
        log = (place / "launcher.log").read_text(encoding="utf-8", errors="replace")
    except OSError:
        log = ""
    events = read_events(log.splitlines())
    first = first_failure(events)
    stalls = [event for event in events if isinstance(event, RunStalled)]
    failure: dict[str, Any] = {
        "attempt": failed.number,
        "cause": failed.cause,
        "rank": failed.rank,
        "host": failed.host,
        "step": failed.ended_step,
        "evidence": str(place),
    }
    waits = []
    if stalls and failed.cause == "hang":
        failure["message"] = stalls[-1].text
        for rank, text in _waits_in_stacks(place):
            if rank not in stalls[-1].ranks:
                waits.append(f"rank {rank} {text}")
    elif isinstance(first, RankFailed):
        failure["message"] = first.cause
        failure["traceback"] = first.traceback.rstrip().splitlines()[-TRACEBACK_LINES:]
    for event in events:
        if not isinstance(event, RankFailed | RankLost) or event.rank == failed.rank:
            continue
        if isinstance(event, RankLost):
            waits.append(f"rank {event.rank} on host {event.host} was lost after it")
        elif is_secondary_failure(event.cause):
            waits.append(f"rank {event.rank} lost its peer: {event.cause.splitlines()[0][:120]}")
        else:
            waits.append(f"rank {event.rank} failed too: {event.cause.splitlines()[0][:120]}")
    return failure, list(dict.fromkeys(waits))


def _waits_in_stacks(place: Path) -> list[tuple[int, str]]:
    """Return what each rank's main thread waited for, from the stacks of a stall."""
    found = []
    for path in sorted((place / "ranks").glob("rank-*.stack")):
        if not (rank := path.stem.removeprefix("rank-")).isdecimal():
            continue
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        # The main thread's is the last of the threads; its innermost frame comes first.
        main = re.split(r"(?m)^(?:Current t|T)hread ", text)[-1]
        frames = [match for line in main.splitlines() if (match := _FRAME.match(line))]
        inside = [f for f in frames if any(part in f["file"] for part in COLLECTIVE_FILES)]
        at = inside[-1] if inside else frames[0] if frames else None
        if at is not None:
            verb = "waits in" if inside else "is in"
            where = f"{Path(at['file']).name}:{at['line']}"
            found.append((int(rank), f"{verb} {at['function']} ({where})"))
    return found


def _tried(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what followed each attempt, in words."""
    words = {
        "restart": "restarted",
        "spare": "restarted with another host",
        "fewer": "planned again for fewer nodes",
        "more": "put back on all nodes",
        "wait": "waited for hosts",
        "stop": "given up",
    }
    found = []
    for each in lines:
        recovery = each["recovery"]
        if recovery is None or recovery.get("cause") == "done":
            continue
        hosts = recovery.get("hosts")
        where = f" on {', '.join(map(str, hosts))}" if isinstance(hosts, list) else ""
        reason = f": {recovery['reason']}" if recovery.get("reason") else ""
        action = words.get(str(recovery.get("action")), str(recovery.get("action")))
        found.append(f"after attempt {each['attempt']} {action}{where}{reason}")
    return found


def _advice(
    plan: Plan,
    folder: Path,
    failed: AttemptSummary | None,
    failure: Mapping[str, Any],
    help_text: str | None,
) -> list[str]:
    if failed is None or failed.cause is None:
        return []
    advice = [ADVICE.get(failed.cause, "").format(host=failed.host or "HOST")]
    if help_text and failed.cause not in ("host", "hang"):
        advice.insert(0, help_text)
    if failed.cause in ("rank", "nonfinite", "hang") and failed.ended_step is not None:
        step = failed.ended_step + 1
        if failed.cause == "nonfinite":
            step = first_nonfinite_step(plan, folder) or failed.ended_step
        if batch := batch_text(plan, folder, step):
            advice.append(batch)
    return [line for line in advice if line]


# The page.


def autopsy_text(report: Autopsy) -> str:
    """Return the page as text."""
    parts = [("what happened", _history(report))]
    if report.failure:
        parts.append(("who failed first", _first(report.failure)))
        parts.append(("what the others did", list(report.waits[:MAX_RANKS]) or ["not known"]))
        if len(report.waits) > MAX_RANKS:
            parts[-1][1].append(f"and {len(report.waits) - MAX_RANKS} more ranks")
    if report.tried:
        parts.append(("what was tried", list(report.tried[-MAX_ATTEMPTS:])))
    parts.append(("what it cost", [cost_text(report.cost, report.repeated_steps)]))
    if report.cost.restarts:
        spent = ", ".join(f"{part} {format_number(s)} s" for part, s in report.cost.parts.items())
        parts[-1][1].append(f"of it {spent}")
    if report.advice:
        parts.append(("what to do", list(report.advice)))
    return "\n".join(
        line for head, lines in parts for line in (head, *(f"  {each}" for each in lines))
    )


def _history(report: Autopsy) -> list[str]:
    lines = [f"{report.status} at step {report.step} of {report.steps}"]
    shown = report.attempts[-MAX_ATTEMPTS:]
    if len(report.attempts) > len(shown):
        lines.append(f"{len(report.attempts) - len(shown)} earlier attempts")
    return [*lines, *(_attempt_text(each, report.status) for each in shown)]


def _attempt_text(attempt: AttemptSummary, status: str) -> str:
    """Return an attempt in one line. status: the run's, for the attempt that no other follows."""
    first, last = (attempt.started_step or 0) + 1, attempt.ended_step or 0
    steps = f"steps {first} to {last}" if last >= first else "no step"
    nodes = f" on {attempt.nodes} node{'' if attempt.nodes == 1 else 's'}" if attempt.nodes else ""
    ended = f"ended by {attempt.cause}" if attempt.cause else status
    if attempt.cause == "return":
        ended = "ended for a host that returned"
    rank = "" if attempt.rank is None else f" rank {attempt.rank}"
    host = "" if attempt.host is None else f" host {attempt.host}"
    who = f" ({(rank + host).strip()})" if rank or host else ""
    lost = "" if attempt.seconds_lost is None else f", {format_number(attempt.seconds_lost)} s lost"
    return f"attempt {attempt.number}: {steps}{nodes}, {ended}{who}{lost}"


def _first(failure: Mapping[str, Any]) -> list[str]:
    rank = "" if failure["rank"] is None else f"rank {failure['rank']}"
    host = "" if failure["host"] is None else f"host {failure['host']}"
    who = ", ".join(filter(None, (rank, host))) or "not known"
    lines = [f"attempt {failure['attempt']}, after step {failure['step']}: {who}"]
    if failure.get("message"):
        lines.append(str(failure["message"]))
    lines += [f"  {line}" for line in failure.get("traceback") or ()]
    return [*lines, f"its files: {failure['evidence']}"]

"""Read run/attempts.jsonl: what each attempt of a run was, why it ended and what it cost."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

from shardwright.utils.json_lines import Count, Figure, Seconds, StepLine, read_json_lines
from shardwright.utils.json_values import JsonValue
from shardwright.utils.number_format import format_number

ATTEMPTS_FILE = "run/attempts.jsonl"
METRICS_FILE = "run/metrics.jsonl"


class AttemptLine(TypedDict):
    """A line of run/attempts.jsonl.

    A start has time (Unix seconds), launcher, hosts (null where a scheduler chooses them), nodes,
    layout, world_size, resume (the checkpoint), step (the checkpoint's) and discarded_seconds (of
    the steps that an earlier attempt trained beyond it). An end has time, outcome (done | preempted
    | failed | lost), exit_code and signal of the launcher, stop_requested, code, cause, rank and
    host of a failure, step (the last one trained), checkpoint (the newest one), first_step_time and
    last_step_time. The end of an attempt that nobody saw end has the outcome of run/status.json, or
    lost; its time is that of the file that it wrote last. A resume line replaces step and
    discarded_seconds of the start, where the ranks found a newer copy in memory. A recovery line is
    a supervisor's: the cause that it found (supervise/), the host, and what it did next.
    """

    event: Literal["start", "resume", "end", "recovery"]
    attempt: Count
    step: NotRequired[Count | None]
    outcome: NotRequired[str | None]
    cause: NotRequired[str | None]
    code: NotRequired[str | None]
    rank: NotRequired[Count | None]
    host: NotRequired[str | None]
    nodes: NotRequired[Count | None]
    layout: NotRequired[str | None]
    discarded_seconds: NotRequired[Seconds | None]
    first_step_time: NotRequired[Figure | None]
    last_step_time: NotRequired[Figure | None]
    time: NotRequired[Figure | None]


def read_attempts(folder: Path) -> list[dict[str, Any]]:
    """Return each attempt of the compiled `folder`: its number, and `start`, `end` and `recovery`
    as they were written; None where a line is missing."""
    found: dict[int, dict[str, Any]] = {}
    for line in read_json_lines(folder / ATTEMPTS_FILE, AttemptLine):
        number, event = line.pop("attempt"), line.pop("event")
        empty = {"attempt": number, "start": None, "end": None, "recovery": None}
        each = found.setdefault(number, empty)
        if event == "resume":
            each["start"] = {**(each["start"] or {}), **line}
        else:
            each[event] = line
    return [found[number] for number in sorted(found)]


# Why an attempt ended, in the words of `launch.recovery.on` where a restart may help.


DISK_ERRORS = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT))
NONFINITE_CODES, HANG_CODE = ("SW6311", "SW6317"), "SW6303"
RANK_CODES = (None, "SW6301", "SW6302", "SW6205", "SW6208", "SW6323")
"""Codes of an attempt that started and that another start may not meet again. Other codes are of
input that every start refuses."""


def end_cause(end: Mapping[str, Any], lost_hosts: Sequence[str] = ()) -> str:
    """Return done | stopped | preemption | nonfinite | hang | disk | host | rank | refused.

    end: an end's line. lost_hosts: hosts of the attempt that ssh no longer reaches
    """
    outcome, code, text = end.get("outcome"), end.get("code"), str(end.get("cause") or "")
    if outcome == "done":
        return "done"
    if outcome == "preempted":
        return "stopped" if end.get("stop_requested") else "preemption"
    if outcome == "failed" and text == "interrupted":
        return "stopped"
    if code in NONFINITE_CODES:
        return "nonfinite"
    if code == HANG_CODE:
        return "hang"
    if any(error in text for error in DISK_ERRORS):
        return "disk"
    if lost_hosts:
        return "host"
    return "rank" if code in RANK_CODES else "refused"


# What the attempts cost.


class _TimedLine(StepLine):
    attempt: Count
    step_seconds: Seconds
    time: Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Hold what run/metrics.jsonl tells of one attempt: when its first step began and its last one
    ended (Unix seconds), and the seconds of its steps."""

    last_step: int
    began: float
    ended: float
    seconds: float


def read_step_times(folder: Path) -> dict[int, StepTimes]:
    """Return the step times of each attempt with lines in run/metrics.jsonl."""
    found: dict[int, StepTimes] = {}
    for line in read_json_lines(folder / METRICS_FILE, _TimedLine):
        number, ended, seconds = line["attempt"], float(line["time"]), float(line["step_seconds"])
        known = found.get(number)
        found[number] = StepTimes(
            last_step=line["step"],
            began=known.began if known else ended - seconds,
            ended=ended,
            seconds=(known.seconds if known else 0.0) + seconds,
        )
    return found


def discarded_seconds(folder: Path, step: int) -> float:
    """Return the seconds of the steps in run/metrics.jsonl beyond `step`, which an attempt that
    resumes there trains again."""
    lines = read_json_lines(folder / METRICS_FILE, _TimedLine, newest_first=True)
    beyond = itertools.takewhile(lambda line: line["step"] > step, lines)
    return sum(float(line["step_seconds"]) for line in beyond)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptSummary:
    """Hold an attempt as run/status.json has it in `attempts`.

    cause: as end_cause has it; None while the attempt runs, and where it trained to the end
    started_step: the checkpoint's that it resumed from, 0 at the start
    seconds_lost: the steps that the next attempt repeats, and the time until its first step; None
        where nothing followed
    """

    number: int
    cause: str | None
    host: str | None
    rank: int | None
    started_step: int | None
    ended_step: int | None
    seconds_lost: float | None
    layout: str | None
    nodes: int | None


def attempt_summaries(folder: Path) -> list[AttemptSummary]:
    """Return the attempts of a compiled folder's run, oldest first."""
    return _summaries(read_attempts(folder), read_step_times(folder))


def _summaries(
    attempts: Sequence[Mapping[str, Any]], times: Mapping[int, StepTimes]
) -> list[AttemptSummary]:
    found = []
    for each, following in itertools.zip_longest(attempts, attempts[1:]):
        start, end, recovery = (each[key] or {} for key in ("start", "end", "recovery"))
        cause = recovery.get("cause") or (end_cause(end) if end else None)
        own = times.get(each["attempt"])
        found.append(
            AttemptSummary(
                number=each["attempt"],
                cause=None if cause == "done" else cause,
                host=recovery.get("host") or end.get("host"),
                rank=end.get("rank"),
                started_step=start.get("step"),
                ended_step=end.get("step") if end else None if own is None else own.last_step,
                seconds_lost=None if following is None else _lost(each, following, times),
                layout=start.get("layout"),
                nodes=start.get("nodes"),
            )
        )
    return found


def _lost(
    ended: Mapping[str, Any], following: Mapping[str, Any], times: Mapping[int, StepTimes]
) -> float | None:
    """Return the seconds from the last step that counts to the next attempt's first one.

    An attempt without a step lasts from its start: all of it is lost, and the one after it waits no
    longer than since its own start.
    """
    start, after = ended["start"] or {}, following["start"] or {}
    since = _time(ended, "last_step_time", times) or start.get("time")
    until = _time(following, "first_step_time", times) or after.get("time")
    if since is None or until is None:
        return None
    return round(max(0.0, until - since) + (after.get("discarded_seconds") or 0.0), 3)


def _time(attempt: Mapping[str, Any], key: str, times: Mapping[int, StepTimes]) -> float | None:
    """Return a time of the end's line, else of run/metrics.jsonl, while the attempt runs."""
    if attempt["end"] is not None:
        value = attempt["end"].get(key)
        return None if value is None else float(value)
    own = times.get(attempt["attempt"])
    if own is None:
        return None
    return own.began if key == "first_step_time" else own.ended


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCost:
    """Hold what the attempts of a run cost.

    seconds_lost: by cause, those with most first
    parts: the same seconds by what they were spent on: noticing that an attempt had failed,
        deciding what follows (planning again included), starting the next one, and repeating steps
    goodput: share of the time from the first attempt's start to the last step that trained steps
        which still count; None before the first step
    """

    restarts: int
    seconds_lost: Mapping[str, float]
    parts: Mapping[str, float]
    goodput: float | None


def run_cost(folder: Path) -> RunCost:
    """Return the cost of a compiled folder's run, from its files."""
    attempts, times = read_attempts(folder), read_step_times(folder)
    summaries = _summaries(attempts, times)
    lost: dict[str, float] = {}
    for each in summaries:
        if each.seconds_lost is not None:
            cause = each.cause or "restart"
            lost[cause] = round(lost.get(cause, 0.0) + each.seconds_lost, 3)
    starts = [each["start"].get("time") for each in attempts if each["start"]]
    trained = sum(each.seconds for each in times.values())
    last = max((each.ended for each in times.values()), default=0.0)
    elapsed = last - starts[0] if starts and starts[0] is not None and last else 0.0
    return RunCost(
        restarts=max(0, len(summaries) - 1),
        seconds_lost=dict(sorted(lost.items(), key=lambda item: -item[1])),
        parts=_parts(attempts, times),
        goodput=min(1.0, trained / elapsed) if elapsed > 0 else None,
    )


def _parts(
    attempts: Sequence[Mapping[str, Any]], times: Mapping[int, StepTimes]
) -> dict[str, float]:
    """Return the seconds that each part of the restarts took; those with unknown times are left
    out."""
    found = dict.fromkeys(("noticing", "deciding", "starting", "repeating"), 0.0)
    for each, following in itertools.pairwise(attempts):
        trained = _time(each, "last_step_time", times)
        moments = {
            # An attempt without a step was starting until it ended.
            "noticing" if trained else "starting": (
                trained or (each["start"] or {}).get("time"),
                (each["end"] or {}).get("time"),
            ),
            "deciding": ((each["end"] or {}).get("time"), (following["start"] or {}).get("time")),
        }
        spans = list(moments.items())
        if (first := _time(following, "first_step_time", times)) is not None:
            spans.append(("starting", ((following["start"] or {}).get("time"), first)))
        for part, (since, until) in spans:
            if since is not None and until is not None:
                found[part] += max(0.0, until - since)
        found["repeating"] += (following["start"] or {}).get("discarded_seconds") or 0.0
    return {part: round(seconds, 3) for part, seconds in found.items()}


def attempts_json(folder: Path) -> list[JsonValue]:
    """Return the summaries as run/status.json has them."""
    return [asdict(each) for each in attempt_summaries(folder)]


def cost_text(cost: RunCost, repeated_steps: int | None = None) -> str:
    """Return seconds lost by cause, and the goodput, in one line."""
    total = sum(cost.seconds_lost.values())
    restarts = f"{cost.restarts} restart{'' if cost.restarts == 1 else 's'}"
    by_cause = ", ".join(f"{cause} {format_number(s)} s" for cause, s in cost.seconds_lost.items())
    lost = f"{restarts}, {format_number(total)} s lost" + (f" ({by_cause})" if by_cause else "")
    twice = "" if repeated_steps is None else f"; {repeated_steps} steps trained twice"
    goodput = "" if cost.goodput is None else f"; goodput {cost.goodput:.0%}"
    return f"{lost}{twice}{goodput}"

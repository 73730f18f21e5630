"""SkyPilot and dstack, which start a task's file on nodes that they rent or schedule: how tasks are
submitted, and what `doctor` asks. No torch here."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from shardwright.diagnostics.host_check import HostCheck, skipped_check
from shardwright.launch.launchers.job_scheduler import (
    missing_programs,
    run_scheduler_command,
    submission_refusal,
    submit_job,
)
from shardwright.plan.plan import Plan
from shardwright.recipe.recipe_types import RecoverySection
from shardwright.recipe.task_options import TASK_SERVICES
from shardwright.utils.json_values import JsonObject

TASK_FILE = "launch/task.yaml"
MAX_TASK_NAME = 41
"""Characters that dstack takes for a run's name."""
_PROGRAMS = {"skypilot": "sky", "dstack": "dstack"}
_WATCH = {"skypilot": "sky jobs queue", "dstack": "dstack ps"}


def merge_task_options(text: str, options: JsonObject) -> str:
    """Return a task's file with the recipe's options: mappings key by key, other values
    replaced. Comments stay."""
    if not options:
        return text
    yaml = YAML(typ="rt")
    yaml.preserve_quotes = True
    yaml.width = 2**16  # a line is never folded
    yaml.indent(mapping=2, sequence=4, offset=2)
    document = yaml.load(text)
    _merge(document, options)
    out = io.StringIO()
    yaml.dump(document, out)
    return out.getvalue()


def _merge(target: MutableMapping[str, Any], options: JsonObject) -> None:
    for key, value in options.items():
        below = target.get(key)
        if isinstance(below, MutableMapping) and isinstance(value, Mapping):
            _merge(below, value)
        else:
            target[key] = value


def error_events(recovery: RecoverySection | None) -> tuple[str, ...]:
    """Return the events after which dstack restarts a run with these causes."""
    if recovery is None:
        return ()
    lost = any(cause in recovery.on for cause in ("host", "preemption"))
    failed = any(cause in recovery.on for cause in ("rank", "hang", "nonfinite"))
    return (*(("no-capacity", "interruption") if lost else ()), *(("error",) if failed else ()))


def submit(plan: Plan, folder: Path, resume: str) -> None:
    if resume != "auto":
        raise submission_refusal(
            "the nodes always continue from the newest checkpoint", "Leave --resume out."
        )
    print(submit_job(["bash", "launch.sh"], folder).strip())
    print(f"watch        {_WATCH[plan.launch.launcher]}")


def checks(plan: Plan, folder: Path, *, shared: bool) -> Iterator[HostCheck]:
    """Check the service's command; the service has no way to judge a task without starting it."""
    launcher = plan.launch.launcher
    program, task = _PROGRAMS[launcher], plan.launch.task
    assert task is not None, "a plan for this launcher has its section"
    absent = missing_programs((program,), launcher)
    version = "" if absent else run_scheduler_command(program, "--version").out.strip()
    yield HostCheck(name="commands", told=version or program, problems=absent)
    yield skipped_check(
        "nodes",
        f"{TASK_SERVICES[launcher]} chooses them later; that {task.directory} there is this folder",
    )


def allocated_hosts() -> list[str]:
    """`doctor` is never in one of its tasks."""
    return []

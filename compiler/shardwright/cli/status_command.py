"""`shardwright status DIR`: how a run is doing."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.cli.command_options import add_json
from shardwright.cli.terminal import shell_quoted
from shardwright.diagnostics.diagnostic_rendering import escape_control_characters
from shardwright.utils.json_values import strict_json
from shardwright.utils.number_format import format_number

if TYPE_CHECKING:
    from shardwright.launch.run_state import RunState
    from shardwright.monitor.run_files import SaveStatistics
    from shardwright.plan.plan import Plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", type=Path, help="a compiled folder")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from shardwright.plan.island_plans import island_folders
    from shardwright.plan.plan import load_plan

    plan = load_plan(args.folder)
    islands = island_folders(plan, args.folder)
    if islands:
        from shardwright.cli import islands_status

        return islands_status.run(plan, args.folder, islands, as_json=args.json)
    state, predicted = read_run_state_and_save_seconds(plan, args.folder)
    print(
        strict_json(_object(state, predicted))
        if args.json
        else as_text(state, args.folder, predicted)
    )
    return 0


def read_run_state_and_save_seconds(plan: Plan, folder: Path) -> tuple[RunState, float | None]:
    """And the seconds that a save is predicted to take."""
    from shardwright.launch.run_state import read_state

    state = read_state(plan, folder)
    return state, None if state.saves is None else _predicted_save_seconds(folder)


def _object(state: RunState, predicted: float | None) -> dict[str, Any]:
    return {**asdict(state), "predicted_save_seconds": predicted}


def last_outer_step(folder: Path) -> dict[str, Any] | None:
    """The last line of run/outer.jsonl; None where there is none."""
    from shardwright.monitor.run_files import OUTER_STEPS_FILE
    from shardwright.utils.json_lines import read_json_lines

    return next(read_json_lines(folder / OUTER_STEPS_FILE, newest_first=True), None)


def _predicted_save_seconds(folder: Path) -> float | None:
    """Return None where the folder's recipe or model cannot be read."""
    from shardwright.compiled_folder import read_folder
    from shardwright.cost.goodput import goodput
    from shardwright.diagnostics import Refusal
    from shardwright.layout.planning_problem import Problem
    from shardwright.utils.json_records import copy_shared_fields

    try:
        subject = read_folder(folder)
    except Refusal:
        return None
    expected = goodput(copy_shared_fields(Problem, subject), subject.estimate)
    return None if expected is None else expected.save_seconds


def as_text(state: RunState, folder: Path, predicted_save_seconds: float | None = None) -> str:
    from shardwright.checkpoint.checkpoint_storage import step_name
    from shardwright.monitor.gradient_noise_scale import noise_scale_text

    rows = [
        (
            "status",
            state.status if state.attempt is None else f"{state.status}, attempt {state.attempt}",
        )
    ]
    if state.step:
        rows.append(("step", f"{state.step} of {state.steps}"))
    if state.loss is not None and state.tokens_per_second is not None:
        rows.append(("loss", f"{state.loss:.4f}"))
        rows.append(("speed", f"{state.tokens_per_second:,.0f} tokens/s"))
    if state.noise_scale is not None:
        rows.append(("noise", noise_scale_text(state.noise_scale)))
    if state.saves is not None:
        rows.append(("saves", _saves(state.saves, predicted_save_seconds)))
    if state.eta_seconds is not None:
        rows.append(("left", remaining_time_text(state.eta_seconds)))
    if state.stalled:
        rows.append(("stalled", escape_control_characters(state.stalled)))
    if state.status == "failed":
        if state.rank is not None:
            rows.append(
                (
                    "where",
                    (
                        f"rank {state.rank}, stage {state.stage}, host "
                        f"{escape_control_characters(str(state.host))}"
                    ),
                )
            )
        elif state.host is not None:
            rows.append(("where", f"host {escape_control_characters(state.host)}"))
        rows.append(("cause", escape_control_characters(str(state.cause))))
        if state.help:
            rows.append(("help", escape_control_characters(state.help)))
    place = shell_quoted(str(folder))
    rank = "" if state.rank is None else f" --rank {state.rank}"
    after = {
        "not started": f"shardwright run {place}",
        "failed": f"shardwright logs {place}{rank}, then shardwright run {place}",
        "preempted": f"shardwright run {place}",
        "done": f"shardwright export {place}/checkpoints/{step_name(state.step)} -o HF_FOLDER",
    }
    rows.append(("next", after.get(state.status, f"shardwright logs {place} -f")))
    return "\n".join(f"{name:<9}{text}" for name, text in rows)


def _saves(saves: SaveStatistics, predicted_seconds: float | None) -> str:
    plan = "" if predicted_seconds is None else f" (predicted {format_number(predicted_seconds)})"
    return (
        f"{saves.count}, {format_number(saves.seconds)} s each{plan}, "
        f"{format_number(saves.gbytes_per_second)} "
        "GB/s a node"
    )


def remaining_time_text(seconds: float) -> str:
    """3 d 04 h, 2 h 05 min, 7 min, 40 s."""
    minutes, hours, days = round(seconds / 60), round(seconds / 3600), seconds / 86400
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    if hours < 48:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{int(days)} d {hours % 24:02d} h"

"""`shardwright status DIR`: how a run is doing."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.cli.command_options import add_island, add_json, island_folder
from shardwright.cli.terminal import shell_quoted
from shardwright.diagnostics import Refusal, refusal
from shardwright.diagnostics.diagnostic_rendering import escape_control_characters
from shardwright.utils.json_values import strict_json
from shardwright.utils.number_format import format_bytes, format_number

if TYPE_CHECKING:
    from shardwright.launch.run_state import RunState
    from shardwright.monitor.run_files import SaveStatistics
    from shardwright.plan.plan import Plan


def add_status_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", type=Path, help="a compiled folder")
    add_json(parser)


def run_status(args: argparse.Namespace) -> int:
    from shardwright.plan.island_plans import island_folders
    from shardwright.plan.plan import load_plan

    plan = load_plan(args.folder)
    islands = island_folders(plan, args.folder)
    if islands:
        from shardwright.cli import monitor_commands

        return monitor_commands.run_islands_status(plan, args.folder, islands, as_json=args.json)
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


# `shardwright status DIR` of several islands: the whole, and each island that is here.


def run_islands_status(plan: Plan, folder: Path, islands: Sequence[Path], *, as_json: bool) -> int:
    from shardwright.plan.plan import load_plan

    local_islands = {k: each for k, each in enumerate(islands) if each.is_dir()}
    states = {
        k: read_run_state_and_save_seconds(load_plan(each), each)
        for k, each in local_islands.items()
    }
    outer = {k: last_outer_step(each) for k, each in local_islands.items()}
    whole = all_islands_json(
        plan, folder, local_islands, {k: state for k, (state, _) in states.items()}
    )
    if as_json:
        objects = [
            {"island": k, **asdict(state), "predicted_save_seconds": predicted, "outer": outer[k]}
            for k, (state, predicted) in states.items()
        ]
        print(strict_json({"whole": whole, "islands": objects}))
        return 0
    parts = [all_islands_text(whole, states)]
    for k, (state, predicted) in states.items():
        text = f"island {k}\n{as_text(state, local_islands[k], predicted)}"
        last_outer = outer[k]
        parts.append(
            text
            if last_outer is None
            else f"{text}\nouter    {_outer_words(last_outer)}, {last_outer['seconds']:.3g} s"
        )
    print("\n\n".join(parts))
    return 0


def all_islands_json(
    plan: Plan, folder: Path, local_islands: Mapping[int, Path], states: Mapping[int, RunState]
) -> dict[str, Any]:
    """here: the islands that are on this machine. step, islands, loss, tokens_per_second: of the
    newest step that all of those have made who took part in the last outer step. tokens: trained
    until then. None where there is none."""
    from shardwright.diloco.island_metrics import (
        effective_rounds,
        merged_steps,
        missing,
        read_rounds,
    )

    rounds = effective_rounds(read_rounds(folder))
    steps = merged_steps(local_islands, rounds, plan.diloco.every_steps)
    absent = missing(plan.diloco.islands, rounds)
    participants = {k for k in local_islands if k not in absent and states[k].step > 0}
    newest = next(
        (each for each in reversed(steps) if participants and participants <= set(each.islands)),
        None,
    )
    rates = [rate for k in participants if (rate := states[k].tokens_per_second) is not None]
    return {
        "step": None if newest is None else newest.step,
        "steps": max((state.steps for state in states.values()), default=None),
        "islands": [] if newest is None else list(newest.islands),
        "loss": None if newest is None else newest.loss,
        "tokens": None
        if newest is None
        else sum(each.tokens for each in steps if each.step <= newest.step),
        "tokens_per_second": sum(rates) if newest is not None and rates else None,
        "outer_steps": len(rounds),
        "last_outer_step": rounds[-1] if rounds else None,
        "missing": [{"island": k, "outer_steps": count} for k, count in absent.items()],
    }


def all_islands_text(
    whole: Mapping[str, Any], states: Mapping[int, tuple[RunState, float | None]]
) -> str:
    rows = []
    if whole["step"] is not None:
        rows.append(("step", f"{whole['step']} of {whole['steps']}"))
        rows.append(
            ("loss", f"{whole['loss']:.4f}, of islands {_listed(whole['islands'])} by their tokens")
        )
        rows.append(("trained", f"{whole['tokens']:,} tokens"))
    if whole["tokens_per_second"] is not None:
        rows.append(("speed", f"{whole['tokens_per_second']:,.0f} tokens/s"))
    last = whole["last_outer_step"]
    rows.append(
        (
            "outer",
            "none yet, or the store is elsewhere" if last is None else _round_words(whole, last),
        )
    )
    for each in whole["missing"]:
        rows.append(
            (
                "missing",
                f"island {each['island']}, for {_steps(each['outer_steps'])}{_why(each, states)}",
            )
        )
    return "\n".join(["all islands", *(f"{name:<9}{text}" for name, text in rows)])


def _round_words(whole: Mapping[str, Any], last: Mapping[str, Any]) -> str:
    joined = f"; {_listed(last['joined'])} took their state" if last["joined"] else ""
    made = _steps(whole["outer_steps"])
    return (
        f"{made}, the last at {_outer_words(last)}, {format_number(last['seconds'])} s in the "
        f"store{joined}"
    )


def _outer_words(line: Mapping[str, Any]) -> str:
    return f"step {line['step']}, " + (
        f"islands {_listed(line['members'])}" if line["members"] else "another island's state taken"
    )


def _why(each: Mapping[str, Any], states: Mapping[int, tuple[RunState, float | None]]) -> str:
    state = states.get(each["island"])
    return " (elsewhere)" if state is None else f" ({state[0].status})"


def _steps(count: int) -> str:
    return f"{count} outer step{'' if count == 1 else 's'}"


def _listed(islands: Sequence[int]) -> str:
    return ", ".join(map(str, islands))


# `shardwright logs DIR`: what a run says, or one of its ranks.


POLL_SECONDS = 0.3


def add_logs_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", type=Path, help="a compiled folder")
    parser.add_argument(
        "--rank",
        type=int,
        metavar="N",
        help="show this rank's own output (default: the launcher's)",
    )
    add_island(parser)
    parser.add_argument(
        "-f", "--follow", action="store_true", help="keep printing until the run ends"
    )


def run_logs(args: argparse.Namespace) -> int:
    from shardwright.launch.run_state import is_alive
    from shardwright.plan.plan import load_plan

    folder = island_folder(args)
    plan = load_plan(folder)
    path = log_path(plan, folder, args.rank)
    if not path.exists() and not (args.follow and is_alive(folder)):
        raise _no_log(plan, path, args.rank)
    _show(plan, path, folder, follow=args.follow)
    return 0


def log_path(plan: Plan, folder: Path, rank: int | None) -> Path:
    """Rank 0's output is the launcher's. Raises Refusal for a rank that the plan does not have."""
    last = len(plan.ranks) - 1
    if rank is not None and not 0 <= rank <= last:
        raise refusal("SW6305", f"there is no rank {rank}", f"The plan has ranks 0 to {last}.")
    return (
        folder / "run" / "logs" / f"rank-{rank:05d}.log"
        if rank
        else folder / "run" / "launcher.log"
    )


def _no_log(plan: Plan, path: Path, rank: int | None) -> Refusal:
    where = ""
    if rank:
        line = plan.ranks[rank].node + 1
        where = (
            f" Without a shared file system it lies on the rank's own host, line {line} of the "
            "hostfile."
        )
    return refusal(
        "SW6305", f"there is no {str(path)!r}", f"It is written once the run has started.{where}"
    )


def _show(plan: Plan, path: Path, folder: Path, *, follow: bool) -> None:
    """A new attempt writes a new file: then from its beginning."""
    from shardwright.launch.run_state import is_alive, read_state

    while follow and not path.exists() and is_alive(folder):
        time.sleep(POLL_SECONDS)
    if not path.exists():
        return
    with path.open(errors="replace") as file:
        while True:
            # Asked before the last read: nothing that comes after it is missed.
            alive = follow and is_alive(folder) and not read_state(plan, folder).is_final
            for text in file:
                print(text, end="", flush=True)
            if not alive:
                return
            time.sleep(POLL_SECONDS)
            if path.exists() and path.stat().st_size < file.tell():
                file.seek(0)


# `shardwright report DIR -o F.html`: a compiled folder, and its run, as one page. --trace: its
# step for Perfetto.


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", type=Path, help="a compiled folder")
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path, required=True, help="the HTML file to write"
    )
    parser.add_argument(
        "--trace",
        metavar="FILE",
        type=Path,
        help="also write the predicted step for Perfetto or chrome://tracing",
    )
    add_json(parser)


def run_report(args: argparse.Namespace) -> int:
    from shardwright.report.report_files import write_report

    written = write_report(args.folder, args.output, args.trace)
    if args.json:
        print(
            strict_json({"files": [{"path": str(path), "bytes": size} for path, size in written]})
        )
        return 0

    for path, size in written:
        print(f"written   {escape_control_characters(str(path))} ({format_bytes(size)})")
    return 0

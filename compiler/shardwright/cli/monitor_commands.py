"""`shardwright status`, `logs` and `report`: show how a run is doing."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from shardwright.cli.command_options import add_folder, add_island, add_json, island_folder
from shardwright.cli.terminal import labelled_lines, shell_quoted
from shardwright.diagnostics import Refusal, refusal
from shardwright.diagnostics.diagnostic_rendering import escape_control_characters
from shardwright.utils.json_values import strict_json
from shardwright.utils.number_format import format_bytes, format_number

if TYPE_CHECKING:
    from shardwright.launch.run_state import RunState
    from shardwright.plan.plan import Plan


def add_status_arguments(parser: argparse.ArgumentParser) -> None:
    add_folder(parser)
    add_json(parser)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """Holds what `status` says of one folder's run. predicted_save_seconds: None where nothing is
    saved yet. outer: the last outer step of an island, as run/outer.jsonl has it."""

    folder: Path
    state: RunState
    predicted_save_seconds: float | None
    outer: Mapping[str, Any] | None


def run_status(args: argparse.Namespace) -> int:
    from shardwright.plan.island_plans import island_folders
    from shardwright.plan.plan import load_plan

    plan = load_plan(args.folder)
    folders = island_folders(plan, args.folder)
    if not folders:
        status = read_run_status(plan, args.folder)
        text = _rows_text(_status_rows(status))
        print(strict_json(_status_json(status)) if args.json else text)
        return 0
    islands = {
        k: read_run_status(load_plan(each), each) for k, each in enumerate(folders) if each.is_dir()
    }
    whole = merge_island_statuses(plan, args.folder, islands)
    if args.json:
        objects = [
            {"island": k, **_status_json(status), "outer": status.outer}
            for k, status in islands.items()
        ]
        print(strict_json({"whole": whole, "islands": objects}))
        return 0
    parts = {"all islands": _merged_rows(whole, islands)}
    for k, status in islands.items():
        parts[f"island {k}"] = _status_rows(status)
        if (outer := status.outer) is not None:
            text = f"{_outer_step_text(outer)}, {outer['seconds']:.3g} s"
            parts[f"island {k}"].append(("outer", text))
    print("\n\n".join(f"{name}\n{_rows_text(rows)}" for name, rows in parts.items()))
    return 0


def _rows_text(rows: Sequence[tuple[str, str]]) -> str:
    """Return the rows as lines. What files of the run say does not reach the terminal raw."""
    return "\n".join(map(escape_control_characters, labelled_lines(rows, STATUS_LABEL_WIDTH)))


def read_run_status(plan: Plan, folder: Path) -> RunStatus:
    from shardwright.launch.run_state import read_state
    from shardwright.monitor.run_files import OUTER_STEPS_FILE, OuterLine
    from shardwright.utils.json_lines import read_json_lines

    state = read_state(plan, folder)
    return RunStatus(
        folder=folder,
        state=state,
        predicted_save_seconds=None if state.saves is None else _predicted_save_seconds(folder),
        outer=next(read_json_lines(folder / OUTER_STEPS_FILE, OuterLine, newest_first=True), None),
    )


def _status_json(status: RunStatus) -> dict[str, Any]:
    from shardwright.monitor.attempt_records import attempt_summaries, read_attempts, run_cost
    from shardwright.monitor.skipped_batches import read_skipped_batches
    from shardwright.train.run_attempt import supervisor_owner

    document = {**asdict(status.state), "predicted_save_seconds": status.predicted_save_seconds}
    cost = run_cost(status.folder)
    pairs = zip(read_attempts(status.folder), attempt_summaries(status.folder), strict=True)
    return {
        **document,
        "supervised": supervisor_owner(status.folder) is not None,
        "seconds_lost": dict(cost.seconds_lost),
        "goodput": cost.goodput,
        "attempts": [{**lines, **asdict(summary)} for lines, summary in pairs],
        "skipped_batches": [asdict(each) for each in read_skipped_batches(status.folder)],
    }


def _predicted_save_seconds(folder: Path) -> float | None:
    """Return None where the folder's recipe or model cannot be read."""
    from shardwright.compile.compiled_folder import read_folder
    from shardwright.cost.goodput import goodput
    from shardwright.layout.planning_problem import Problem
    from shardwright.utils.json_values import copy_shared_fields

    try:
        subject = read_folder(folder)
    except Refusal:
        return None
    expected = goodput(copy_shared_fields(Problem, subject), subject.estimate)
    return None if expected is None else expected.save_seconds


def _status_rows(status: RunStatus) -> list[tuple[str, str]]:
    from shardwright.checkpoint.checkpoint_storage import step_name
    from shardwright.monitor.attempt_records import cost_text, run_cost
    from shardwright.monitor.gradient_noise_scale import noise_scale_text
    from shardwright.monitor.skipped_batches import skipped_steps
    from shardwright.train.run_attempt import supervisor_owner

    state = status.state
    attempt = "" if state.attempt is None else f", attempt {state.attempt}"
    rows = [("status", f"{state.status}{attempt}")]
    if state.step:
        rows.append(("step", f"{state.step} of {state.steps}"))
    if state.loss is not None and state.tokens_per_second is not None:
        rows.append(("loss", f"{state.loss:.4f}"))
        rows.append(("speed", f"{state.tokens_per_second:,.0f} tokens/s"))
    if state.noise_scale is not None:
        rows.append(("noise", noise_scale_text(state.noise_scale)))
    if state.saves is not None:
        saves, seconds = state.saves, status.predicted_save_seconds
        predicted = "" if seconds is None else f" (predicted {format_number(seconds)})"
        text = f"{saves.count}, {format_number(saves.seconds)} s each{predicted}"
        rows.append(("saves", f"{text}, {format_number(saves.gbytes_per_second)} GB/s a node"))
    if state.eta_seconds is not None:
        rows.append(("left", remaining_time_text(state.eta_seconds)))
    if state.stalled:
        rows.append(("stalled", state.stalled))
    if state.status == "failed":
        host = f"host {state.host}"
        if state.rank is not None:
            rows.append(("where", f"rank {state.rank}, stage {state.stage}, {host}"))
        elif state.host is not None:
            rows.append(("where", host))
        rows.append(("cause", str(state.cause)))
        if state.help:
            rows.append(("help", state.help))
    if state.earlier:
        rows.append(("attempts", state.earlier))
        rows.append(("lost", cost_text(run_cost(status.folder))))
    if steps := skipped_steps(status.folder):
        rows.append(("skipped", f"the batch of step {', '.join(map(str, steps))}"))
    if (owner := supervisor_owner(status.folder)) is not None:
        rows.append(("restarts", f"by the supervisor on {owner.place}"))
    place = shell_quoted(str(status.folder))
    rank = "" if state.rank is None else f" --rank {state.rank}"
    after = {
        "not started": f"shardwright run {place}",
        "failed": f"shardwright logs {place}{rank}, then shardwright run {place}",
        "preempted": f"shardwright run {place}",
        "done": f"shardwright export {place}/checkpoints/{step_name(state.step)} -o HF_FOLDER",
    }
    rows.append(("next", after.get(state.status, f"shardwright logs {place} -f")))
    return rows


def remaining_time_text(seconds: float) -> str:
    """Return a time as 3 d 04 h, 2 h 05 min, 7 min or 40 s."""
    minutes, hours, days = round(seconds / 60), round(seconds / 3600), seconds / 86400
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    if hours < 48:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{int(days)} d {hours % 24:02d} h"


# `shardwright status DIR` of several islands: all of them merged, and each that is on this machine.


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedStatus:
    """Holds what `status` says of all islands as one. step, islands, loss, tokens_per_second: of
    the newest step that every local island which took part in the last outer step has made; None
    where there is none. tokens: trained until then. last_outer_step: as the store's file has it."""

    step: int | None
    steps: int | None
    islands: Sequence[int]
    loss: float | None
    tokens: int | None
    tokens_per_second: float | None
    outer_steps: int
    last_outer_step: Mapping[str, Any] | None
    missing: Sequence[MissingIsland]


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingIsland:
    """Names an island that the last outer_steps outer steps went without."""

    island: int
    outer_steps: int


def merge_island_statuses(
    plan: Plan, folder: Path, islands: Mapping[int, RunStatus]
) -> MergedStatus:
    from shardwright.diloco.island_metrics import (
        effective_rounds,
        merged_steps,
        missing,
        read_rounds,
    )

    rounds = effective_rounds(read_rounds(folder))
    folders = {k: status.folder for k, status in islands.items()}
    steps = merged_steps(folders, rounds, plan.diloco.every_steps)
    absent = missing(plan.diloco.islands, rounds)
    participants = {k for k in islands if k not in absent and islands[k].state.step > 0}
    rates = [rate for k in participants if (rate := islands[k].state.tokens_per_second) is not None]
    newest = next(
        (each for each in reversed(steps) if participants and participants <= set(each.islands)),
        None,
    )
    trained = [each.tokens for each in steps if newest is not None and each.step <= newest.step]
    return MergedStatus(
        step=None if newest is None else newest.step,
        steps=max((status.state.steps for status in islands.values()), default=None),
        islands=() if newest is None else newest.islands,
        loss=None if newest is None else newest.loss,
        tokens=None if newest is None else sum(trained),
        tokens_per_second=sum(rates) if newest is not None and rates else None,
        outer_steps=len(rounds),
        last_outer_step=rounds[-1] if rounds else None,
        missing=[MissingIsland(island=k, outer_steps=count) for k, count in absent.items()],
    )


def _merged_rows(whole: MergedStatus, islands: Mapping[int, RunStatus]) -> list[tuple[str, str]]:
    rows = []
    if whole.step is not None:
        rows.append(("step", f"{whole.step} of {whole.steps}"))
        rows.append(
            ("loss", f"{whole.loss:.4f}, of islands {_listed(whole.islands)} by their tokens")
        )
        rows.append(("trained", f"{whole.tokens:,} tokens"))
    if whole.tokens_per_second is not None:
        rows.append(("speed", f"{whole.tokens_per_second:,.0f} tokens/s"))
    last, outer = whole.last_outer_step, "none yet, or the store is elsewhere"
    if last is not None:
        joined, seconds = last["joined"], last["seconds"]
        outer = f"{_outer_steps(whole.outer_steps)}, the last at {_outer_step_text(last)}"
        outer += f", {format_number(seconds)} s in the store"
        outer += f"; {_listed(joined)} took their state" if joined else ""
    rows.append(("outer", outer))
    for each in whole.missing:
        status = islands.get(each.island)
        why = "elsewhere" if status is None else status.state.status
        text = f"island {each.island}, for {_outer_steps(each.outer_steps)} ({why})"
        rows.append(("missing", text))
    return rows


def _outer_step_text(outer: Mapping[str, Any]) -> str:
    members = outer["members"]
    who = f"islands {_listed(members)}" if members else "another island's state taken"
    return f"step {outer['step']}, {who}"


def _outer_steps(count: int) -> str:
    return f"{count} outer step{'' if count == 1 else 's'}"


def _listed(islands: Sequence[int]) -> str:
    return ", ".join(map(str, islands))


# `shardwright logs DIR`: what a run says, or one of its ranks.


POLL_SECONDS = 0.3
STATUS_LABEL_WIDTH = 9


def add_logs_arguments(parser: argparse.ArgumentParser) -> None:
    add_folder(parser)
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
    from shardwright.launch.run_state import is_alive, read_state
    from shardwright.plan.plan import load_plan
    from shardwright.train.run_attempt import supervisor_owner

    folder = island_folder(args)
    plan = load_plan(folder)
    path = log_path(plan, folder, args.rank)

    def runs() -> bool:
        if supervisor_owner(folder) is not None:  # also between two attempts
            return True
        return is_alive(folder) and not read_state(plan, folder).is_final

    if not path.exists() and not (args.follow and runs()):
        where = ""
        if args.rank:
            line = plan.ranks[args.rank].node + 1
            where = (
                f" Without a shared file system it lies on the rank's own host, line {line} of the "
                "hostfile."
            )
        raise refusal(
            "SW6305",
            f"there is no {str(path)!r}",
            f"It is written once the run has started.{where}",
        )
    while True:
        while args.follow and not path.exists() and runs():
            time.sleep(POLL_SECONDS)
        if not path.exists():
            return 0
        with path.open(errors="replace") as file:
            is_current = True
            while is_current:
                # Asked before the last read: nothing that comes after it is missed.
                follows = args.follow and runs()
                is_current = _is_same_file(path, file)
                for text in file:
                    print(text, end="", flush=True)
                if not follows:
                    return 0
                time.sleep(POLL_SECONDS)


def _is_same_file(path: Path, file: TextIO) -> bool:
    """Return whether the open file is still the one at `path`: the next attempt moves it."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except OSError:
        return False


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


# `shardwright autopsy DIR`: why a run ended, and what it cost, on one page.


def add_autopsy_arguments(parser: argparse.ArgumentParser) -> None:
    add_folder(parser)
    add_island(parser)
    add_json(parser)


def run_autopsy(args: argparse.Namespace) -> int:
    from shardwright.plan.plan import load_plan
    from shardwright.supervise.autopsy import autopsy_text, read_autopsy

    folder = island_folder(args)
    report = read_autopsy(load_plan(folder), folder)
    if args.json:
        print(strict_json(asdict(report)))
        return 0
    print("\n".join(map(escape_control_characters, autopsy_text(report).splitlines())))
    return 0


# `shardwright report DIR -o F.html`: a compiled folder, and its run, as one page. --trace: its
# step for Perfetto.


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    add_folder(parser)
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

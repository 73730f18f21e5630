"""`outer-store`, and `run --island all`: a plan's islands and their store, as processes of this
machine. No torch."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from shardwright.diagnostics import Refusal, refusal
from shardwright.diloco.island_metrics import ROUNDS_FILE, RoundLog
from shardwright.diloco.outer_store_channel import distribute_secret
from shardwright.diloco.outer_store_server import OuterStore
from shardwright.diloco.round_membership import Membership
from shardwright.plan.island_plans import island_folders, plan_digest
from shardwright.plan.plan import Plan, load_plan
from shardwright.utils.child_processes import end_processes, shardwright_command

POLL_SECONDS = 0.2
INTERRUPTED, NOT_FINISHED = 130, 3
_BACKLOG = 1024


def serve_outer_store(folder: Path, bind: str | None) -> int:
    """Until an island has trained to the last step and all have left: 0; or an interrupt: 130.
    Every committed outer step is a line of run/rounds.jsonl. bind: None is the plan's address.
    Raises Refusal: SW6321 where that file cannot be written."""
    plan = load_plan(folder)
    folders = island_folders(plan, folder)
    if not folders:
        raise _no_islands(folder)
    outer, secret = plan.diloco, distribute_secret(folder, folders)
    listener = _listen(bind or str(plan.launch.outer_store))
    members = Membership(
        outer.islands, plan.strategy.world_size, outer.deadline_seconds, outer.precision
    )
    try:
        rounds = RoundLog(folder)
    except OSError as error:
        raise _rounds_file_refusal(folder, error, "no outer step can be made") from None
    store = OuterStore(members, secret, plan_digest(plan), _print_line, rounds.write)
    _print_line(
        f"listening at {':'.join(map(str, listener.getsockname()[:2]))} for {outer.islands} islands"
    )
    try:
        code = _serve(store, listener)
    finally:
        rounds.close()
        try:
            sys.stdout.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if store.failure is not None:
        raise _rounds_file_refusal(
            folder, store.failure, "the outer step that was under way is not made"
        ) from None
    return code


def _rounds_file_refusal(folder: Path, error: Exception, what: str) -> Refusal:
    why = (
        error.strerror
        if isinstance(error, OSError) and error.strerror
        else f"{type(error).__name__}: {error}"
    )
    return refusal(
        "SW6321",
        f"{str(folder / ROUNDS_FILE)!r} cannot be written: {why}; {what}, and the store stops",
        (
            "Free disk space and start `shardwright outer-store` again. Each island waits "
            "outer.deadline_seconds for the store, then saves a checkpoint and stops: "
            "`shardwright run` continues from that checkpoint."
        ),
    )


def _print_line(line: str) -> None:
    """Prints for a person. Never raises: the store serves its islands whether or not somebody can
    read its output."""
    with contextlib.suppress(OSError, ValueError):
        print(line, flush=True)


def _serve(store: OuterStore, listener: socket.socket) -> int:
    ended, told = threading.Event(), threading.Event()
    previous = {s: signal.signal(s, lambda *_: told.set()) for s in (signal.SIGINT, signal.SIGTERM)}
    threads = [
        threading.Thread(target=store.serve, args=(listener,), daemon=True),
        threading.Thread(target=store.watch, args=(ended,), daemon=True),
    ]
    for thread in threads:
        thread.start()
    try:
        while not store.is_over and store.failure is None and not told.wait(POLL_SECONDS):
            pass
        return INTERRUPTED if told.is_set() else 0
    finally:
        ended.set()
        listener.close()
        for number, handler in previous.items():
            signal.signal(number, handler)


def _listen(address: str) -> socket.socket:
    """Raises Refusal: SW6318."""
    host, _, port = address.rpartition(":")
    try:
        return socket.create_server((host, int(port)), backlog=_BACKLOG)
    except (OSError, ValueError, OverflowError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise refusal(
            "SW6318",
            f"cannot listen at {address}: {why}",
            (
                "Give --bind HOST:PORT with an address of this machine, and forward "
                "launch.outer_store to it; or stop the program that listens at that port."
            ),
        ) from None


def _no_islands(folder: Path) -> Refusal:
    return refusal(
        "SW6014",
        f"the plan in {str(folder)!r} has no DiLoCo islands",
        "Pass the compiled folder of a recipe with cluster.islands, not one island's folder.",
    )


def run_all_islands(folder: Path, resume: str) -> int:
    """Run every island and the store on this machine. Returns the first exit code that is not 0.

    Island 0's output is shown; the other islands' output goes to files in run/logs.
    """
    plan = load_plan(folder)
    folders = island_folders(plan, folder)
    if not folders:
        raise _no_islands(folder)
    if plan.launch.launcher != "local":
        raise refusal(
            "SW6014",
            f"--island all starts every island on this machine, but the plan in {str(folder)!r} "
            f"uses the launcher {plan.launch.launcher}",
            "Start each island by itself: `shardwright run DIR --island K`.",
        )
    distribute_secret(folder, folders)
    with _processes(plan, folder, resume) as (store, islands):
        codes = [process.wait() for process in islands]
        if not any(codes):
            codes.append(store.wait())
        elif store.poll():
            print(
                f"the outer store ended with exit code {store.returncode}: {_last_error(folder)}",
                file=sys.stderr,
            )
        return next((code for code in codes if code), 0)


def _last_error(folder: Path) -> str:
    """Return the outer store's last error in its log, or where the log is."""
    path = folder / "run" / "logs" / "outer-store.log"
    with contextlib.suppress(OSError):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        return next(
            (line for line in reversed(lines) if line.startswith("error")), f"see {str(path)!r}"
        )
    return f"see {str(path)!r}"


@contextlib.contextmanager
def _processes(
    plan: Plan, folder: Path, resume: str
) -> Iterator[tuple[subprocess.Popen[bytes], list[subprocess.Popen[bytes]]]]:
    """(the store, the islands), ended with the block."""
    logs = folder / "run" / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str, *words: str, shown: bool = False) -> subprocess.Popen[bytes]:
        with (logs / f"{name}.log").open("wb") as log:
            out = None if shown else log
            process = subprocess.Popen(
                shardwright_command(*words), stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )
        started.append(process)
        return process

    try:
        store = start("outer-store", "outer-store", str(folder))
        islands = [
            start(
                f"island-{k}",
                "run",
                str(folder),
                "--island",
                str(k),
                "--resume",
                resume,
                shown=k == 0,
            )
            for k in plan.island_numbers
        ]
        yield store, islands
    finally:
        end_processes(started, signal.SIGINT, 30)
        sys.stdout.flush()

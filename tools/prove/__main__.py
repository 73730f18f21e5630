"""`make prove`: runs the pieces that have not passed on the files as they are, and writes
build/prove/TREE.json."""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import psutil

from tools.prove.proof_pieces import LOOKS_AT, PIECES
from tools.prove.proof_results import ROOT, PieceResult, run_folder, stamp, write_run

HOST_COMMANDS = ("ip", "pdsh", "sshd")
GRACE_SECONDS = 20.0
"""Between SIGTERM and SIGKILL, for tests to end the ranks that they started."""
WRITING = threading.Lock()


def main() -> int:
    parser = argparse.ArgumentParser(prog="make prove", description=__doc__)
    parser.add_argument(
        "pieces", nargs="*", metavar="PIECE", help="only these (make prove PIECES='parity lora')"
    )
    parser.add_argument(
        "--for",
        dest="subjects",
        nargs="*",
        default=[],
        metavar="SUBJECT",
        help=f"only the pieces that look at a package or feature: {', '.join(LOOKS_AT)}",
    )
    parser.add_argument("--jobs", type=int, default=1, help="pieces that run at the same time")
    parser.add_argument("--again", action="store_true", help="run also what has passed")
    parser.add_argument("--list", action="store_true", help="name the pieces; run none")
    arguments = parser.parse_args()
    for asked, known in ((arguments.pieces, PIECES), (arguments.subjects, LOOKS_AT)):
        if unknown := sorted(set(asked) - set(known)):
            parser.error(f"unknown: {', '.join(unknown)}. Choose from: {', '.join(known)}")
    chosen = pieces_of(arguments.pieces, arguments.subjects)
    if arguments.list:
        print("\n".join(described(name) for name in chosen))
        return 0
    run = run_folder()
    stamp()  # of the files as they are now, whatever is committed during the run
    if arguments.again:
        for name in chosen:
            PieceResult(name, run).forget()
    beside = [name for name in chosen if not PIECES[name].alone]
    alone = [name for name in chosen if PIECES[name].alone]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        passed = dict(zip(beside, pool.map(partial(run_piece, run=run), beside), strict=True))
    passed |= {name: run_piece(name, run) for name in alone}
    failed = [name for name, well in passed.items() if not well]
    print(f"results: {run.with_suffix('.json').relative_to(ROOT)}; make proof-page shows them")
    print(f"NOT passed: {', '.join(failed)}" if failed else f"{len(chosen)} pieces passed")
    return 1 if failed else 0


def pieces_of(pieces: list[str], subjects: list[str]) -> list[str]:
    """Those that are named or look at a subject, in the table's order; all where none is asked
    for."""
    wanted = {*pieces, *(name for subject in subjects for name in LOOKS_AT[subject])}
    return [name for name in PIECES if name in wanted or not wanted]


def described(piece: str) -> str:
    """A line of --list."""
    row = PIECES[piece]
    notes = [note for note in ("hosts", "alone") if getattr(row, note)]
    return f"{piece:21s} at most {row.minutes:3.0f} min  {row.title}" + (
        f" ({', '.join(notes)})" if notes else ""
    )


def run_piece(piece: str, run: Path) -> bool:
    """Run the tests of a piece that have not passed on this tree. Returns whether all have.

    At the piece's deadline it is ended, with everything that it started.
    """
    row = PIECES[piece]
    if row.hosts and (missing := _missing()):
        print(f"{piece}: needs {missing}; `make test-hosts` installs them", flush=True)
        return False
    result = PieceResult(piece, run)
    log = run / f"{piece}.log"
    before = len(result.passed())
    print(f"{piece}: begins; {before} of its tests passed before on this tree", flush=True)
    began = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-p", "tools.prove.pytest_results", "-m", "prove"]
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [*command, "--prove-piece", piece, "--prove-run", str(run), *row.tests],
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            code = _wait(process, row.minutes * 60)
        except subprocess.TimeoutExpired:
            _end(process.pid)
            code = -1
    document = result.document(code)
    with WRITING:
        write_run(run, {piece: document})
    took = datetime.timedelta(seconds=round(time.monotonic() - began))
    print(f"{piece}: {document['outcome']}, {document['tests']} tests, {took}", flush=True)
    if code < 0:
        print(f"{piece}: ended at its deadline of {row.minutes:g} minutes", flush=True)
    if document["outcome"] != "passed":
        print("\n".join(log.read_text(encoding="utf-8").splitlines()[-30:]), flush=True)
    return bool(document["outcome"] == "passed")


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int:
    return process.wait(seconds)


def _end(pid: int) -> None:
    """End a process and all that it started."""
    parent = psutil.Process(pid)
    family = [*parent.children(recursive=True), parent]
    parent.terminate()
    psutil.wait_procs([parent], timeout=GRACE_SECONDS)
    for process in family:
        if process.is_running():
            process.kill()
    psutil.wait_procs(family, timeout=GRACE_SECONDS)


def _missing() -> str:
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    missing = [command for command in HOST_COMMANDS if shutil.which(command, path=path) is None]
    if os.geteuid() != 0:
        missing.append("root")
    return ", ".join(missing)


if __name__ == "__main__":
    sys.exit(main())

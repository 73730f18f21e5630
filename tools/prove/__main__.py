"""`make prove`: runs the pieces whose results are missing, failed, or older than the code that they
speak of. It says first how long that takes, and last which published figures it renewed."""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import subprocess
import sys
import time

from tools.generate.proof_page import AREAS
from tools.prove.proof_ledger import BENCHMARKS, ROOT, Ledger, digest_of, summary
from tools.prove.proof_pieces import PIECES

HOST_COMMANDS = ("ip", "pdsh", "sshd")


def main() -> int:
    parser = argparse.ArgumentParser(prog="make prove", description=__doc__)
    parser.add_argument(
        "pieces", nargs="*", metavar="PIECE", help="only these (make prove PIECES='parity lora')"
    )
    parser.add_argument(
        "--list",
        action="store_true",
        help="say how old each piece is and how long it took; run none",
    )
    parser.add_argument(
        "--again", action="store_true", help="run a piece also where its result is current"
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.pieces) - set(PIECES):
        parser.error(f"no such piece: {', '.join(sorted(unknown))}. There are: {', '.join(PIECES)}")
    chosen = arguments.pieces or list(PIECES)
    if arguments.list:
        print("\n".join(described(name) for name in chosen))
        return 0
    due = [name for name in chosen if arguments.again or not is_current(name)]
    print(forecast(due), flush=True)
    before = published()
    failed = [name for name in due if not run(name)]
    print("\n".join(renewed(before, published())))
    print(f"failed: {', '.join(failed)}" if failed else "every piece passed on this code")
    return 1 if failed else 0


def is_current(piece: str) -> bool:
    line = summary().get(piece, {})
    return line.get("outcome") == "passed" and line.get("digest") == digest_of(piece)


def forecast(due: list[str]) -> str:
    """How long the pieces take, by their last durations, less what has passed already on this
    code."""
    if not due:
        return "nothing is due: every result is of this code (--again runs it anyway)"
    timed = [piece for piece in due if piece in summary()]
    seconds = sum(
        max(0, summary()[piece]["seconds"] - Ledger(piece).passed_seconds()) for piece in timed
    )
    about = (
        f"about {datetime.timedelta(seconds=round(seconds))}, by the durations in "
        "benchmarks/prove.json"
    )
    untimed = [piece for piece in due if piece not in timed]
    left_out = f"; never timed: {', '.join(untimed)}" if untimed else ""
    return f"{len(due)} pieces are due ({', '.join(due)}): {about}{left_out}"


def published() -> dict[str, bytes]:
    """Area -> what its file in benchmarks/ holds."""
    areas = (area for piece in PIECES.values() for area in piece.areas)
    return {
        area: path.read_bytes() for area in areas if (path := BENCHMARKS / f"{area}.json").exists()
    }


def renewed(before: dict[str, bytes], after: dict[str, bytes]) -> list[str]:
    """A line for each published file that is another than before, with its row of docs/proof.md."""
    areas = [area for area, content in after.items() if before.get(area) != content]
    lines = [
        f"renewed: benchmarks/{area}.json" + (f", {AREAS[area]}" if area in AREAS else "")
        for area in areas
    ]
    return (
        [*lines, "`make generated` writes docs/proof.md from them"]
        if lines
        else ["no published figure was renewed"]
    )


def described(piece: str) -> str:
    line = summary().get(piece)
    if line is None:
        return f"{piece:20s} never run"
    age = (
        "current"
        if is_current(piece)
        else "older than the code"
        if line["outcome"] == "passed"
        else line["outcome"]
    )
    took = datetime.timedelta(seconds=line["seconds"])
    return (
        f"{piece:20s} {age:20s} {line['date']}  {line['commit'][:7]}  {line['tests']:4d} "
        f"tests  {took}"
    )


def run(piece: str) -> bool:
    """Goes on where an earlier run of the same code was cut off. Whether all of its tests have
    passed."""
    if PIECES[piece].hosts and (missing := _missing()):
        print(f"{piece}: needs {missing}; `make test-hosts` installs them", flush=True)
        return False
    ledger = Ledger(piece)
    began = time.monotonic()
    print(f"{piece}: {len(ledger.passed())} tests passed before on this code", flush=True)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "prove",
        "--prove-piece",
        piece,
        *PIECES[piece].tests,
    ]
    code = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONUNBUFFERED": "1"}).returncode
    outcomes = {line["outcome"] for line in ledger.outcomes().values()}
    # 5: every test had passed in an earlier run.
    passed = code in (0, 5) and outcomes == {"passed"}
    if code in (0, 1, 5) and outcomes:
        ledger.publish("passed" if passed else "failed" if "failed" in outcomes else "skipped")
    print(
        f"{piece}: {'passed' if passed else 'NOT passed'} after {time.monotonic() - began:.0f} s",
        flush=True,
    )
    return passed


def _missing() -> str:
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    missing = [command for command in HOST_COMMANDS if shutil.which(command, path=path) is None]
    if os.geteuid() != 0:
        missing.append("root")
    return ", ".join(missing)


if __name__ == "__main__":
    sys.exit(main())

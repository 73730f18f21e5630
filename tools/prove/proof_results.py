"""What a run of `make prove` found: a file a piece under build/prove/TREE/, test by test, so that a
run that was cut off goes on where it stopped; and the one file build/prove/TREE.json that they
become.

TREE is git's hash of the files as they are, changes that are not committed included: results of one
tree are never mixed with those of another.
"""

from __future__ import annotations

import datetime
import functools
import json
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from tests.figures import as_json
from tools.prove.proof_pieces import FIGURES, PIECES

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
RUNS = ROOT / "build" / "prove"
WRITTEN_FROM_RESULTS = ("benchmarks", "docs/proof.md")


class PieceResult:
    """build/prove/TREE/PIECE.jsonl: a line a finding or a finished test, in the order of time."""

    def __init__(self, piece: str, run: Path) -> None:
        """run: build/prove/TREE."""
        self.piece = piece
        run.mkdir(parents=True, exist_ok=True)
        self.file = run / f"{piece}.jsonl"

    def finding(self, test: str, area: str, case: str, figures: dict[str, Any]) -> None:
        """Keep what a test measured. What is not finite becomes null: readers take it for the
        worst. Raises ValueError for an area that is not the piece's."""
        if area not in PIECES[self.piece].areas:
            raise ValueError(f"the piece {self.piece} does not name the area {area}")
        self._write({"test": test, "area": area, "case": case, "figures": as_json(figures)})

    def finished(self, test: str, outcome: str, seconds: float) -> None:
        """outcome: passed | failed | skipped."""
        self._write({"test": test, "outcome": outcome, "seconds": round(seconds, 1)})

    def passed(self) -> set[str]:
        return {test for test, line in self._outcomes().items() if line["outcome"] == "passed"}

    def document(self, exit_code: int) -> dict[str, Any]:
        """The piece in build/prove/TREE.json: outcome (passed | failed | skipped | unfinished),
        date, tests, seconds, not_passed (test names), cases (area -> case -> figures).

        exit_code: pytest's; other than 0, 1 and 5 (no test was left to run) it was cut off.
        """
        outcomes = self._outcomes()
        kinds = {line["outcome"] for line in outcomes.values()}
        cases: dict[str, dict[str, Any]] = {}
        for line in self._lines():
            if "figures" in line and line["test"] in outcomes:
                cases.setdefault(line["area"], {})[line["case"]] = line["figures"]
        if "failed" in kinds or exit_code == 1:
            outcome = "failed"
        elif exit_code in (0, 5) and kinds:
            outcome = "skipped" if "skipped" in kinds else "passed"
        else:
            outcome = "unfinished"
        return {
            "outcome": outcome,
            "date": datetime.date.today().isoformat(),
            "tests": len(outcomes),
            "seconds": round(sum(line["seconds"] for line in outcomes.values())),
            "not_passed": sorted(set(outcomes) - self.passed()),
            "cases": cases,
        }

    def forget(self) -> None:
        self.file.unlink(missing_ok=True)

    def _write(self, line: dict[str, Any]) -> None:
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")

    def _lines(self) -> Iterator[dict[str, Any]]:
        if not self.file.exists():
            return
        for text in self.file.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(text)
            except ValueError:  # a half-written line: its process was killed
                continue

    def _outcomes(self) -> dict[str, dict[str, Any]]:
        """Test -> its last outcome."""
        return {line["test"]: line for line in self._lines() if "outcome" in line}


def run_folder() -> Path:
    """build/prove/TREE of the files as they are."""
    return RUNS / _tree()


def write_run(run: Path, documents: dict[str, dict[str, Any]]) -> Path:
    """Write build/prove/TREE.json with these pieces in place of its own of the same names, and
    benchmarks/AREA.json for each figure of a piece that passed. Returns the first."""
    path = run.with_suffix(".json")
    before = json.loads(path.read_text(encoding="utf-8"))["pieces"] if path.exists() else {}
    _write_json(path, {**stamp(), "pieces": {**before, **documents}})
    for piece, document in documents.items():
        if document["outcome"] == "passed":
            for area in FIGURES & document["cases"].keys():
                _write_json(
                    BENCHMARKS / f"{area}.json",
                    {
                        **stamp(),
                        "command": f"make prove PIECES={piece}",
                        "cases": document["cases"][area],
                    },
                )
    return path


def newest_cases(area: str) -> tuple[str, dict[str, dict[str, Any]]] | None:
    """(date, case -> figures) of the newest run in which the area's piece passed; None without
    one."""
    found = None
    for run in runs():
        for piece in run["pieces"].values():
            if piece["outcome"] == "passed" and area in piece["cases"]:
                found = (piece["date"], piece["cases"][area])
    return found


def runs() -> list[dict[str, Any]]:
    """Every build/prove/*.json, the oldest first."""
    files = sorted(RUNS.glob("*.json"), key=lambda path: path.stat().st_mtime)
    return [json.loads(path.read_text(encoding="utf-8")) for path in files]


@functools.cache
def stamp() -> dict[str, Any]:
    """date, commit, machine of a figure that is written now; uncommitted where files differ."""
    now = {"date": datetime.date.today().isoformat(), "commit": git("rev-parse", "HEAD")}
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks")
    return {**now, **({"uncommitted": True} if changed else {}), "machine": _machine()}


def git(*words: str, **environment: str) -> str:
    """What git prints; empty where it fails or is missing."""
    if shutil.which("git") is None:
        return ""
    return subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, env={**os.environ, **environment}
    ).stdout.strip()


def _machine() -> str:
    memory = psutil.virtual_memory().total / 2**30
    packages = ", ".join(
        f"{name} {metadata.version(name)}" for name in ("torch", "transformers", "deepspeed")
    )
    return (
        f"{psutil.cpu_count()} CPU cores ({platform.machine()}), {memory:.0f} GiB, "
        f"Python {platform.python_version()}, {packages}"
    )


def _tree() -> str:
    """git's hash of the working tree, without what a run itself writes."""
    with tempfile.TemporaryDirectory() as folder:
        index = Path(folder) / "index"
        if (current := ROOT / git("rev-parse", "--git-path", "index")).is_file():
            shutil.copyfile(current, index)
        place = {"GIT_INDEX_FILE": str(index)}
        git("add", "--all", **place)
        git("rm", "-r", "-q", "--cached", "--ignore-unmatch", *WRITTEN_FROM_RESULTS, **place)
        return git("write-tree", **place)[:12] or "without-git"


def _write_json(path: Path, document: dict[str, Any]) -> None:
    temporary = path.with_suffix(".partial")
    temporary.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    temporary.replace(path)

"""What a piece has found so far, kept test by test, so that a run that was cut off goes on where it
stopped; and the files under benchmarks/ that a whole piece becomes.
"""

from __future__ import annotations

import ast
import datetime
import functools
import hashlib
import json
import os
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.figures import as_json
from tools.prove.proof_pieces import PIECES, source_paths, tests_of

# A digest of the code that a figure speaks of: what it does, not how it is commented.


ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "compiler" / "shardwright"
ENGINES = ("torch", "transformers", "deepspeed")

# Written from what the proofs measured: a figure that changed its own digest would always be old.
MADE_BY_PROOFS = {
    "vlm_support.json",
    "support.json",
    "tensor_verified.json",
    "tensor_unsplit.json",
    "prediction_errors.json",
}


def code_digest(source_paths: tuple[str, ...], tests: tuple[str, ...]) -> str:
    """source_paths: folders and files under compiler/shardwright. tests: pytest's arguments. Raises
    FileNotFoundError for a path that is not there: the table of pieces is wrong."""
    files = {file for name in source_paths for file in _files(PACKAGE / name)}
    for test in tests:
        files |= _with_imports(ROOT / test.partition("::")[0])
    whole = hashlib.sha256()
    for engine in ENGINES:
        whole.update(f"{engine} {metadata.version(engine)}\n".encode())
    for file in sorted(files):
        whole.update(f"{file.relative_to(ROOT).as_posix()} {_content(file)}\n".encode())
    return whole.hexdigest()[:16]


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(path)
    return [
        file
        for file in path.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts and file.name not in MADE_BY_PROOFS
    ]


def _with_imports(path: Path) -> set[Path]:
    """A test module, what it imports of tests/ and tools/, and the workers beside it that it starts
    by their names."""
    found: set[Path] = set()
    left = [path]
    while left:
        file = left.pop()
        if file not in found:
            found.add(file)
            left += _imports(file)
    return found


@functools.cache
def _imports(file: Path) -> list[Path]:
    found: list[Path] = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.split(".")[0] in ("tests", "tools")
        ):
            place = ROOT.joinpath(*node.module.split("."))
            found += [
                f
                for f in (place.with_suffix(".py"), *(place / f"{a.name}.py" for a in node.names))
                if f.exists()
            ]
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value.endswith(".py")
        ):
            beside = file.parent / Path(node.value).name
            if beside.exists():
                found.append(beside)
    return found


@functools.cache
def _content(file: Path) -> str:
    data = file.read_bytes()
    if file.suffix == ".py":
        tree = ast.parse(data)
        for node in ast.walk(tree):
            _drop_docstrings(node)
        data = ast.dump(tree).encode()
    return hashlib.sha256(data).hexdigest()


def _drop_docstrings(node: ast.AST) -> None:
    """Strings that stand alone, wherever they are; they do nothing."""
    body = getattr(node, "body", None)
    if isinstance(body, list):
        body[:] = [
            line
            for line in body
            if not (
                isinstance(line, ast.Expr)
                and isinstance(line.value, ast.Constant)
                and isinstance(line.value.value, str)
            )
        ]


BENCHMARKS = ROOT / "benchmarks"
SUMMARY = BENCHMARKS / "prove.json"


def digest_of(piece: str) -> str:
    return code_digest(PIECES[piece].source_paths, PIECES[piece].tests)


def stamp(area: str) -> dict[str, Any]:
    """Date, commit and digest for a benchmarks/AREA.json that is written now."""
    return {**_when(), "digest": code_digest(source_paths(area), tests_of(area))}


def state(area: str) -> str:
    """current | older (than the code that it speaks of) | unstamped (written before files had a
    digest)."""
    document = json.loads((BENCHMARKS / f"{area}.json").read_text(encoding="utf-8"))
    if "digest" not in document:
        return "unstamped"
    return (
        "current"
        if document["digest"] == code_digest(source_paths(area), tests_of(area))
        else "older"
    )


def summary() -> dict[str, dict[str, Any]]:
    """benchmarks/prove.json: piece -> date, commit, digest, outcome (passed, failed), tests,
    seconds."""
    return dict(json.loads(SUMMARY.read_text(encoding="utf-8"))) if SUMMARY.exists() else {}


def _when() -> dict[str, Any]:
    head = _git("rev-parse", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks")
    now = {"date": datetime.date.today().isoformat(), "commit": head}
    return {**now, "uncommitted": True} if changed else now


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()


class Ledger:
    """build/prove/PIECE/: a file a process, a line a figure or a finished test. Lines of other code
    are forgotten."""

    def __init__(self, piece: str, folder: Path = ROOT / "build" / "prove") -> None:
        self.piece = piece
        self.digest = digest_of(piece)
        self._folder = folder / piece / self.digest
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file = self._folder / f"{os.getpid()}.jsonl"

    def figure(self, test: str, area: str, case: str, figures: dict[str, Any]) -> None:
        """What is not finite becomes null: readers take it for the worst."""
        if area not in PIECES[self.piece].areas:
            raise ValueError(f"the piece {self.piece} does not name the area {area}")
        self._write({"test": test, "area": area, "case": case, "figures": as_json(figures)})

    def finished(self, test: str, outcome: str, seconds: float) -> None:
        """outcome: passed | failed | skipped."""
        self._write({"test": test, "outcome": outcome, "seconds": seconds})

    def _write(self, line: dict[str, Any]) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")

    def _lines(self) -> Iterator[dict[str, Any]]:
        for path in sorted(self._folder.glob("*.jsonl"), key=lambda p: p.stat().st_mtime):
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    yield json.loads(line)
                except ValueError:  # a half-written last line: its process was killed
                    continue

    def outcomes(self) -> dict[str, dict[str, Any]]:
        """Test -> its last outcome."""
        return {line["test"]: line for line in self._lines() if "outcome" in line}

    def passed(self) -> set[str]:
        return {test for test, line in self.outcomes().items() if line["outcome"] == "passed"}

    def passed_seconds(self) -> float:
        passed = (line for line in self.outcomes().values() if line["outcome"] == "passed")
        return float(sum(line["seconds"] for line in passed))

    def publish(self, outcome: str) -> None:
        """Writes the piece's line of prove.json and, where all passed, its benchmarks/AREA.json."""
        outcomes = self.outcomes()
        when = {**_when(), "digest": self.digest}
        line = {
            **when,
            "outcome": outcome,
            "tests": len(outcomes),
            "seconds": round(sum(o["seconds"] for o in outcomes.values())),
        }
        bad = sorted(test for test, o in outcomes.items() if o["outcome"] != "passed")
        _write_json(
            SUMMARY, {**summary(), self.piece: {**line, "not_passed": bad} if bad else line}
        )
        if outcome != "passed":
            return
        cases: dict[str, dict[str, Any]] = {area: {} for area in PIECES[self.piece].areas}
        for entry in self._lines():
            if "figures" in entry and entry["test"] in outcomes:
                cases[entry["area"]][entry["case"]] = entry["figures"]
        for area, found in cases.items():
            document = {**when, "command": f"make prove PIECES={self.piece}", "cases": found}
            _write_json(BENCHMARKS / f"{area}.json", document)


def _write_json(path: Path, document: dict[str, Any]) -> None:
    temporary = path.with_suffix(".partial")
    temporary.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    temporary.replace(path)

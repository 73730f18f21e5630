"""Every test of `make prove` is in one piece, and a run goes on where it was cut off."""

from __future__ import annotations

import ast
import json
import subprocess
import time
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import pytest

from tools.generate import proof_page
from tools.prove import __main__ as prove
from tools.prove import proof_results
from tools.prove.proof_pieces import BENCHES, FIGURES, LOOKS_AT, PIECES, Piece
from tools.prove.proof_results import PieceResult

ROOT = proof_results.ROOT
MARK = "mark.prove"


def proving_functions(path: Path) -> set[str]:
    """Functions marked `prove`, or with a parameter that is; all of a module whose pytestmark has
    it."""
    source = path.read_text(encoding="utf-8")
    module = ast.parse(source).body
    functions = [n for n in module if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")]
    statements = [ast.unparse(n) for n in module if isinstance(n, ast.Assign)]
    if any(text.startswith("pytestmark") and MARK in text for text in statements):
        return {f.name for f in functions}
    return {f.name for f in functions if any(MARK in ast.unparse(d) for d in f.decorator_list)}


def test_every_proof_is_in_exactly_one_piece() -> None:
    marked = {
        f"{path.relative_to(ROOT).as_posix()}::{name}"
        for path in (ROOT / "tests").rglob("test_*.py")
        if MARK in path.read_text(encoding="utf-8") and path != Path(__file__)
        for name in proving_functions(path)
    }
    named = [test for piece in PIECES.values() for test in piece.tests]
    owners = Counter(m for m in marked for test in named if test in (m, m.partition("::")[0]))
    assert {m: owners[m] for m in marked} == dict.fromkeys(marked, 1)
    assert all(any(m.startswith(test) for m in marked) for test in named), "a piece without proofs"


def test_every_figure_is_written_by_one_piece_or_bench() -> None:
    areas = Counter([*(area for piece in PIECES.values() for area in piece.areas), *BENCHES])
    assert set(areas.values()) == {1} and areas.keys() >= FIGURES
    assert {p.stem for p in (ROOT / "benchmarks").glob("*.json")} == FIGURES


def test_every_package_has_pieces_that_look_at_it() -> None:
    package = ROOT / "compiler" / "shardwright"
    packages = {p.name for p in package.iterdir() if (p / "__init__.py").exists()}
    assert packages <= LOOKS_AT.keys()
    assert all(set(pieces) <= PIECES.keys() and pieces for pieces in LOOKS_AT.values())
    assert {piece for pieces in LOOKS_AT.values() for piece in pieces} == PIECES.keys()


def test_pieces_are_chosen_by_name_and_by_what_they_look_at() -> None:
    assert prove.pieces_of([], []) == list(PIECES)
    assert prove.pieces_of(["lora", "fuzz"], []) == ["fuzz", "lora"]
    assert prove.pieces_of(["lora"], ["islands"]) == ["lora", "islands", "islands-network"]


CASE: dict[str, Any] = {"loss": 1e-6}


def test_a_piece_goes_on_where_it_was_cut_off(tmp_path: Path) -> None:
    first = PieceResult("lora", tmp_path)
    first.finding("a", "lora", "one", CASE)
    first.finished("a", "passed", 1.0)
    first.finding("b", "lora", "two", {"loss": 1.0})
    first.file.open("a").write('{"test": "b", "outc')  # killed here
    assert first.document(-9)["outcome"] == "unfinished"
    again = PieceResult("lora", tmp_path)
    assert again.passed() == {"a"}
    again.file.open("a").write("\n")
    again.finding("b", "lora", "two", CASE)
    again.finished("b", "passed", 2.0)
    document = again.document(0)
    assert document["cases"] == {"lora": {"one": CASE, "two": CASE}}
    assert (document["outcome"], document["tests"], document["seconds"]) == ("passed", 2, 3)
    again.forget()
    assert again.passed() == set()


@pytest.mark.parametrize(
    ("outcomes", "code", "outcome"),
    [
        (["passed", "passed"], 0, "passed"),
        (["passed"], 5, "passed"),
        (["passed", "skipped"], 0, "skipped"),
        (["passed", "failed"], 1, "failed"),
        (["passed"], 1, "failed"),
        (["passed"], -15, "unfinished"),
        (["passed"], 2, "unfinished"),
        ([], 5, "unfinished"),
    ],
)
def test_how_a_piece_ended(outcomes: list[str], code: int, outcome: str, tmp_path: Path) -> None:
    result = PieceResult("lora", tmp_path)
    for number, each in enumerate(outcomes):
        result.finished(str(number), each, 1.0)
    assert result.document(code)["outcome"] == outcome


def test_a_figure_that_is_not_finite_is_null(tmp_path: Path) -> None:
    result = PieceResult("lora", tmp_path)
    result.finding("a", "lora", "one", {"loss": float("nan")})
    result.finished("a", "passed", 1.0)
    cases = result.document(0)["cases"]["lora"]
    assert cases == {"one": {"loss": None}}
    assert proof_page.deviation(cases) == "loss not finite"


def test_a_piece_records_its_own_areas(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not name the area parity"):
        PieceResult("lora", tmp_path).finding("a", "parity", "one", CASE)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """build/prove of these tests."""
    monkeypatch.setattr(proof_results, "BENCHMARKS", tmp_path / "benchmarks")
    monkeypatch.setattr(proof_results, "RUNS", tmp_path / "prove")
    (tmp_path / "benchmarks").mkdir()
    return tmp_path / "prove"


def document(outcome: str, area: str) -> dict[str, Any]:
    return {
        "outcome": outcome,
        "date": "2026-01-02",
        "tests": 1,
        "seconds": 3,
        "not_passed": [],
        "cases": {area: {"one": CASE}},
    }


def test_a_run_is_one_file_and_figures_are_kept_in_benchmarks(kept: Path) -> None:
    kept.mkdir()
    path = proof_results.write_run(kept / "abc", {"lora": document("passed", "lora")})
    proof_results.write_run(kept / "abc", {"overhead": document("passed", "overhead")})
    proof_results.write_run(kept / "abc", {"decoding": document("failed", "decoding")})
    run = json.loads(path.read_text())
    assert list(run["pieces"]) == ["lora", "overhead", "decoding"] and run["date"] and run["commit"]
    (figure,) = (kept.parent / "benchmarks").iterdir()
    written = json.loads(figure.read_text())
    assert figure.name == "overhead.json" and written["cases"] == {"one": CASE}
    assert written["machine"].endswith(f"deepspeed {metadata.version('deepspeed')}")
    assert proof_results.newest_cases("lora") == ("2026-01-02", {"one": CASE})
    assert proof_results.newest_cases("decoding") is None


def test_the_tree_is_of_the_files_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof_results, "ROOT", tmp_path)
    proof_results.git("init", "-q")
    (tmp_path / ".gitignore").write_text("build/\n")
    (tmp_path / "benchmarks").mkdir()
    code, figure = tmp_path / "loss.py", tmp_path / "benchmarks" / "cost.json"
    code.write_text("1\n")
    first = proof_results.run_folder()
    figure.write_text("{}\n")
    assert proof_results.run_folder() == first
    code.write_text("2\n")
    assert proof_results.run_folder() != first
    code.write_text("1\n")
    assert proof_results.run_folder() == first
    assert proof_results.git("status", "--porcelain").count("?? ") == 3, "the index is untouched"


def test_a_piece_is_ended_at_its_deadline_with_what_it_started(
    kept: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    test = tmp_path / "test_slow.py"
    test.write_text(
        "import pathlib, subprocess, sys, time, pytest\n"
        "pytestmark = pytest.mark.prove\n"
        "def test_one(): pass\n"
        "def test_two():\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"    pathlib.Path({str(tmp_path / 'new')!r}).write_text(str(child.pid))\n"
        f"    pathlib.Path({str(tmp_path / 'new')!r}).rename({str(tmp_path / 'pid')!r})\n"
        "    time.sleep(600)\n"
    )
    monkeypatch.setitem(PIECES, "lora", Piece(title="slow", tests=(str(test),), minutes=1))

    def until_the_child_runs(process: subprocess.Popen[bytes], seconds: float) -> int:
        while not (tmp_path / "pid").exists() and process.poll() is None:
            time.sleep(0.05)
        raise subprocess.TimeoutExpired("pytest", seconds)

    with monkeypatch.context() as patch:
        patch.setattr(prove, "_wait", until_the_child_runs)
        assert prove.run_piece("lora", kept / "abc") is False
    found = json.loads((kept / "abc.json").read_text())["pieces"]["lora"]
    assert (found["outcome"], found["tests"]) == ("unfinished", 1)
    child = int((tmp_path / "pid").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie"
    # The rest of it, in the next run of the same tree.
    test.write_text(test.read_text().replace("sleep(600)", "sleep(0)"))
    assert prove.run_piece("lora", kept / "abc") is True
    assert "1 deselected" in (kept / "abc" / "lora.log").read_text()


ROWS = {
    "LoRA over data ranks": ["2026-01-01", "0123456789", "3", "loss 1.0e-06"],
    "--why-not answers for random layouts": ["2026-01-01", "0123456789+", "1000", ""],
}


def test_a_run_replaces_its_rows_of_the_page_and_leaves_the_others() -> None:
    page = proof_page.written(f"a\n{proof_page.BEGIN}\nold\n{proof_page.END}\nb", ROWS)
    assert proof_page.rows_of(page) == ROWS and page.startswith("a\n") and page.endswith("\nb")
    assert page.count("| ? |") == 2, "a commit of another history"
    run: dict[str, Any] = {
        "commit": proof_results.git("rev-parse", "HEAD"),
        "pieces": {"lora": document("passed", "lora"), "why-not": document("failed", "why-not")},
    }
    rows = proof_page.rows_of(proof_page.written(page, proof_page.measured([run])))
    assert rows["LoRA over data ranks"] == ["2026-01-02", run["commit"][:10], "1", "loss 1.0e-06"]
    assert (
        rows["--why-not answers for random layouts"] == ROWS["--why-not answers for random layouts"]
    )


P, R, W = {"verdict": "proved"}, {"verdict": "refused"}, {"verdict": "wrong"}
EQUAL = {"outcome": "equal", "weights": 1e-7, "words": "x"}


@pytest.mark.parametrize(
    ("cases", "count", "deviation"),
    [
        (
            {"a": {"loss": 1e-6, "norm": 2e-7}, "b bf16": {"loss": 1e-3}},
            "1 in fp32, 1 in bf16 within 2 %",
            "loss 1.0e-06, norm 2.0e-07",
        ),
        (
            {"a": {**P, "loss": 1e-6}, "b": {**R, "loss": 1.0}},
            "1 of 2 verified, 1 rejected",
            "loss 1.0e-06",
        ),
        ({"a": P, "b": {**W, "loss": 1.0}}, "1 of 2 verified, 1 wrong", "loss 1.0e+00"),
        (
            {"a": EQUAL, "b": {"outcome": "refused"}, "by code": {"SW1": 3}},
            "1 of 2 verified, 1 rejected",
            "weights 1.0e-07",
        ),
        (
            {"a": {"eager": "proved", "sdpa": "why"}, "b": {"eager": "why"}},
            "1 of 2 verified, 1 rejected",
            "",
        ),
    ],
)
def test_cases_of_a_row(cases: dict[str, Any], count: str, deviation: str) -> None:
    assert (proof_page.counted(cases), proof_page.deviation(cases)) == (count, deviation)

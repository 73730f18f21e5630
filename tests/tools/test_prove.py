"""Every test of `make prove` is in one piece, and a piece goes on where it was cut off."""

from __future__ import annotations

import ast
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tools.generate import proof_page
from tools.prove import __main__ as prove
from tools.prove import proof_ledger
from tools.prove.proof_ledger import Ledger, digest_of
from tools.prove.proof_pieces import BENCHES, PIECES

ROOT = proof_ledger.ROOT
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


def test_every_file_of_benchmarks_is_written_by_a_piece_or_a_bench() -> None:
    areas = Counter([*(area for piece in PIECES.values() for area in piece.areas), *BENCHES])
    assert set(areas.values()) == {1}
    assert {p.stem for p in (ROOT / "benchmarks").glob("*.json")} <= {*areas, "prove"}


@pytest.mark.parametrize("piece", PIECES)
def test_a_piece_names_code_that_is_there(piece: str) -> None:
    assert len(digest_of(piece)) == 16


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(proof_ledger, "ROOT", tmp_path)
    monkeypatch.setattr(proof_ledger, "PACKAGE", tmp_path / "package")
    (tmp_path / "package").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "package" / "loss.py").write_text("def loss(x):\n    return x + 1\n")
    (tmp_path / "tests" / "test_loss.py").write_text(
        'from tests.helper import f\nfrom tools.bench import h\nWORKER = "worker.py"\n'
    )
    (tmp_path / "tests" / "helper.py").write_text("f = 1\n")
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "bench.py").write_text("h = 1\n")
    (tmp_path / "tests" / "worker.py").write_text("g = 1\n")
    return tmp_path


def digest_there() -> str:
    proof_ledger._content.cache_clear()
    proof_ledger._imports.cache_clear()
    return proof_ledger.code_digest(("loss.py",), ("tests/test_loss.py::test_it",))


@pytest.mark.parametrize(
    ("file", "text", "changes"),
    [
        (
            "package/loss.py",
            '"""Text."""\ndef loss(x):\n    """More."""\n    # why\n    return (x + 1)\n',
            False,
        ),
        ("package/loss.py", "def loss(x):\n    return x + 2\n", True),
        ("package/other.py", "x = 1\n", False),
        ("tests/helper.py", "f = 2\n", True),
        ("tests/worker.py", "g = 2\n", True),
        ("tools/bench.py", "h = 2\n", True),
    ],
)
def test_a_digest_is_of_what_the_code_does(
    package: Path, file: str, text: str, changes: bool
) -> None:
    before = digest_there()
    (package / file).write_text(text)
    assert (digest_there() != before) is changes


FIGURES: dict[str, Any] = {"loss": 1e-6}


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(proof_ledger, "BENCHMARKS", tmp_path)
    monkeypatch.setattr(proof_ledger, "SUMMARY", tmp_path / "prove.json")
    return tmp_path


def test_a_piece_goes_on_where_it_was_cut_off(kept: Path) -> None:
    first = Ledger("lora", kept / "build")
    first.figure("a", "lora", "one", FIGURES)
    first.finished("a", "passed", 1.0)
    first.figure("b", "lora", "two", {"loss": 1.0})
    first._file.open("a").write('{"test": "b", "outc')  # killed here
    again = Ledger("lora", kept / "build")
    assert again.passed() == {"a"}
    again._file = again._file.with_name("again.jsonl")
    again.figure("b", "lora", "two", FIGURES)
    again.finished("b", "passed", 2.0)
    again.publish("passed")
    document = json.loads((kept / "lora.json").read_text())
    assert document["cases"] == {"one": FIGURES, "two": FIGURES}
    assert document["digest"] == digest_of("lora") and document["commit"] and document["date"]
    line = proof_ledger.summary()["lora"]
    assert (line["outcome"], line["tests"], line["seconds"]) == ("passed", 2, 3)


def test_a_piece_that_failed_leaves_the_figures_that_were_proved(kept: Path) -> None:
    (kept / "lora.json").write_text("{}")
    failing = Ledger("lora", kept / "build")
    failing.figure("a", "lora", "one", FIGURES)
    failing.finished("a", "failed", 1.0)
    failing.publish("failed")
    assert (kept / "lora.json").read_text() == "{}"
    assert proof_ledger.summary()["lora"]["not_passed"] == ["a"]


def test_a_figure_that_is_not_finite_is_null(kept: Path) -> None:
    found = Ledger("lora", kept / "build")
    found.figure("a", "lora", "one", {"loss": float("nan")})
    found.finished("a", "passed", 1.0)
    found.publish("passed")
    assert json.loads((kept / "lora.json").read_text())["cases"] == {"one": {"loss": None}}


def test_a_piece_writes_its_own_areas(kept: Path) -> None:
    with pytest.raises(ValueError, match="does not name the area parity"):
        Ledger("lora", kept / "build").figure("a", "parity", "one", FIGURES)


def test_proof_marks_what_is_older_than_the_code(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof_page, "BENCHMARKS", kept)
    cases = {"llama": {"verdict": "proved", "loss": 1e-6, "norm": 1e-6, "weights": 1e-7}}
    for area, stamp in {
        "zoo-zero": proof_ledger.stamp("zoo-zero"),
        "zoo-pipeline": {**proof_ledger.stamp("zoo-pipeline"), "digest": "of other code"},
        "zoo-tensor": {"date": "2026-01-01"},
    }.items():
        (kept / f"{area}.json").write_text(json.dumps({**stamp, "cases": cases}))
    assert proof_page.states() == {
        "zoo-zero": "current",
        "zoo-pipeline": "older",
        "zoo-tensor": "unstamped",
    }
    readme = proof_page.written(
        f"a\n{proof_page.BEGIN}\nold\n{proof_page.END}\nb",
        frozenset({"zoo-pipeline", "zoo-tensor"}),
    )
    assert proof_page.marked(readme) == {"zoo-pipeline", "zoo-tensor"}
    assert readme.startswith("a\n") and readme.endswith("\nb")
    text = "a [1](../benchmarks/zoo-tensor.json). [2](../benchmarks/zoo-zero.json) †\n"
    marked = proof_page.written(
        f"{text}{proof_page.BEGIN}\n{proof_page.END}", frozenset({"zoo-tensor"})
    )
    assert marked.startswith(
        "a [1](../benchmarks/zoo-tensor.json) †. [2](../benchmarks/zoo-zero.json)\n"
    )


def test_it_says_how_long_it_takes_and_what_it_renewed(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prove, "Ledger", lambda piece: Ledger(piece, kept / "build"))
    monkeypatch.setattr(prove, "BENCHMARKS", kept)
    (kept / "prove.json").write_text(
        json.dumps({"lora": {"seconds": 3700}, "parity": {"seconds": 100}})
    )
    Ledger("lora", kept / "build").finished("a", "passed", 200.0)
    assert prove.forecast([]).startswith("nothing is due")
    assert prove.forecast(["lora", "parity", "crash"]) == (
        "3 pieces are due (lora, parity, crash): about 1:00:00, by the durations in "
        "benchmarks/prove.json; never timed: crash"
    )
    before = prove.published()
    assert before == {} and prove.renewed(before, before) == ["no published figure was renewed"]
    (kept / "parity.json").write_text("{}")
    assert prove.renewed(before, prove.published()) == [
        "renewed: benchmarks/parity.json, layouts of Llama, GPT-2 and Qwen2, 8 steps",
        "`make generated` writes docs/proof.md from them",
    ]

"""The repository as a newcomer finds it."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_ci_runs_lint_and_tests_as_make_does() -> None:
    script = ROOT / ".ci/run"
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", script], capture_output=True).stderr == b""
    lines = script.read_text().splitlines()
    # Not indented: whatever Python the machine has besides.
    assert [line for line in lines if line.startswith("step make ")] == [
        "step make setup",
        "step make lint",
        "step make test",
        "step make test-more",
    ]
    assert "set -euo pipefail" in lines


def test_ci_runs_every_python_that_pyproject_names() -> None:
    """3.11 all of the tests, the others those without torch."""
    named = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    light = re.findall(r"\bpython(3\.\d+)", (ROOT / ".ci/run").read_text())
    assert named == ["3.11", *reversed(light)] and len(light) == 2
    steps = {
        f'python: "{version}", run: make lint-light test-light PYTHON=python{version}'
        for version in light
    }
    steps.add('python: "3.11", run: .ci/run')
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    assert set(re.findall(r'python: "3\.\d+", run: [^}]*', workflow)) == steps


def test_each_test_is_in_one_part_of_the_sample() -> None:
    """`make test` or `make test-more`; what is marked prove or hosts is in neither."""
    parts = dict(
        re.findall(r"^(QUICK|MORE) := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    )
    assert len(parts) == 2
    marks = ("launch", "browser", "prove", "hosts")
    for chosen in itertools.product((False, True), repeat=len(marks)):
        marked = dict(zip(marks, chosen, strict=True))
        runs = [name for name, expression in parts.items() if eval(expression, {}, marked)]
        assert len(runs) == (not marked["prove"] and not marked["hosts"]), (marked, runs)


def test_make_targets_exist() -> None:
    for target in (
        "setup",
        "demo",
        "test",
        "test-more",
        "test-light",
        "test-newest",
        "lint-light",
        "test-hosts",
        "prove",
        "lint",
        "generated",
        "golden",
        "build",
    ):
        done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_every_recipe_is_in_the_index() -> None:
    index = (ROOT / "recipes/README.md").read_text()
    assert set(re.findall(r"\]\(([^)]+\.yaml)\)", index)) == {
        p.name for p in (ROOT / "recipes").glob("*.yaml")
    }


def test_decisions_are_numbered_without_gaps() -> None:
    names = sorted(p.name for p in (ROOT / "compiler/decisions").glob("*.md"))
    assert [int(name[:3]) for name in names] == list(range(1, len(names) + 1))


def test_links_between_documents_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "recipes").glob("*.md")]
    for page in [*pages, *(ROOT / "compiler").rglob("*.md")]:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page}: {target}"

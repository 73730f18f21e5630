"""Each mend undone by the smallest edit, in a copy of the tree: the test that stands for it
fails."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
MUTATIONS: list[dict[str, Any]] = [
    mutation
    for path in sorted(Path(__file__).parent.glob("*.json"))
    for mutation in json.loads(path.read_text(encoding="utf-8"))
]
"""undone: what the edits take away. edits: file, text that is there, what stands there instead.
tests: pytest's."""
TESTS_FAILED = 1  # pytest's exit code; 2 and more: none of them ran


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = tmp_path_factory.mktemp("mutations") / "tree"
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in filter(None, listed.split("\0")):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tree / name)
    return tree


@pytest.fixture
def mutated(copy: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """The copy with the edits of one mutation, which are taken back."""
    kept: dict[Path, str] = {}
    for name, there, instead in request.param["edits"]:
        text = (copy / name).read_text(encoding="utf-8")
        assert there in text, f"{name} has changed: {there!r} is not there"
        kept.setdefault(copy / name, text)
        (copy / name).write_text(text.replace(there, instead), encoding="utf-8")
    yield copy
    for path, text in kept.items():
        path.write_text(text, encoding="utf-8")


def outcome(tree: Path, tests: list[str]) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(tree / "compiler"), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, timeout=900
    )


def test_what_the_edits_replace_is_there() -> None:
    """A mutation whose text has moved would be found when `make prove` is run, weeks later."""
    edits = [(mutation["undone"], *edit) for mutation in MUTATIONS for edit in mutation["edits"]]
    gone = [
        (undone, name)
        for undone, name, there, _ in edits
        if there not in (ROOT / name).read_text("utf-8")
    ]
    assert gone == []
    names = [mutation["undone"] for mutation in MUTATIONS]
    assert len(names) == len(set(names))


@pytest.mark.prove
def test_on_the_tree_as_it_is_all_of_them_pass(copy: Path) -> None:
    done = outcome(copy, sorted({test for mutation in MUTATIONS for test in mutation["tests"]}))
    assert done.returncode == 0, done.stdout[-5000:]


@pytest.mark.prove
@pytest.mark.parametrize(
    "mutated", MUTATIONS, indirect=True, ids=[mutation["undone"] for mutation in MUTATIONS]
)
def test_a_mend_that_is_undone_is_seen(mutated: Path, request: pytest.FixtureRequest) -> None:
    mutation = request.node.callspec.params["mutated"]
    done = outcome(mutated, mutation["tests"])
    assert done.returncode == TESTS_FAILED, done.stdout[-5000:] + done.stderr[-2000:]

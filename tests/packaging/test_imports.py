"""Nothing but runtime/, model/ and hf/ imports a heavy library at module level (import-linter sees no levels)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardwright

PACKAGE = Path(shardwright.__file__).parent
HEAVY = {"torch", "transformers", "deepspeed"}
FREE = {"runtime", "model", "hf"}
# `run` talks to the launcher from the user's shell: these import no torch either.
LIGHT_RUNTIME = {
    "attempt.py",
    "submit.py",
    "launcher.py",
    "journal.py",
    "failure.py",
    "progress.py",
    "checkpoint_index.py",
    "tracking.py",
    "checkpoint_manifest.py",
    "checkpoint_store.py",
}
# What finds a graph that was traced before.
LIGHT_MODEL = {"build.py", "cache.py", "read.py", "hub.py", "shipped.py", "graphs.py"}
MODULES = sorted(PACKAGE.rglob("*.py"))


def module_level_imports(tree: ast.Module) -> Iterator[str]:
    """Top names of the packages that importing the module imports: function bodies and TYPE_CHECKING are skipped."""
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").split(".")[0]
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            waiting += ast.iter_child_nodes(node)  # a class's methods are function bodies too


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_heavy_imports(path: Path) -> None:
    parts = path.relative_to(PACKAGE).parts
    if parts[0] in FREE and path.name not in LIGHT_RUNTIME | LIGHT_MODEL:
        return
    found = HEAVY & set(module_level_imports(ast.parse(path.read_text(encoding="utf-8"))))
    assert not found, f"{path} imports {found} at module level"


def test_the_light_files_are_there() -> None:
    assert {path.name for path in MODULES} >= LIGHT_RUNTIME | LIGHT_MODEL


def test_the_check_sees_what_it_should() -> None:
    source = """
import json
if True:
    import torch.nn
try:
    from deepspeed import comm
except ImportError:
    pass
if TYPE_CHECKING:
    import transformers
def f():
    import transformers
"""
    assert set(module_level_imports(ast.parse(source))) & HEAVY == {"torch", "deepspeed"}

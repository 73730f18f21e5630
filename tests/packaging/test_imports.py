"""Heavy libraries are imported at module level only by model/, hf/ and what runs on the ranks."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardwright

PACKAGE = Path(shardwright.__file__).parent
HEAVY = {"torch", "transformers", "deepspeed"}
# What runs on the ranks, and what takes models apart.
FREE = {"checkpoint", "engines", "models", "parallel", "train"}
FREE_FILES = {
    "calibrate/device_benchmarks.py",
    "calibrate/layer_benchmarks.py",
    "diloco/outer_step.py",
    "diloco/outer_store_client.py",
    "launch/link_bandwidth.py",
    "verify/reference_objectives.py",
    "verify/reference_run.py",
}
# `run` talks to the launcher from the user's shell: these import no torch either, as launch/ and
# watch/.
LIGHT_RUNTIME = {
    "checkpoint/resume_checkpoint.py",
    "checkpoint/checkpoint_manifest.py",
    "checkpoint/checkpoint_storage.py",
    "train/run_attempt.py",
    "train/experiment_trackers.py",
}
# What finds a graph that was traced before.
LIGHT_MODEL = {
    "models/graph_builder.py",
    "models/model_sources.py",
}
MODULES = sorted(PACKAGE.rglob("*.py"))


def module_level_imports(tree: ast.Module) -> Iterator[str]:
    """Top names of the packages that importing the module imports: function bodies and
    TYPE_CHECKING are skipped."""
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
    name = path.relative_to(PACKAGE).as_posix()
    if name in FREE_FILES or (
        name.split("/")[0] in FREE and name not in LIGHT_RUNTIME | LIGHT_MODEL
    ):
        return
    found = HEAVY & set(module_level_imports(ast.parse(path.read_text(encoding="utf-8"))))
    assert not found, f"{path} imports {found} at module level"


def test_the_light_files_are_there() -> None:
    assert {
        path.relative_to(PACKAGE).as_posix() for path in MODULES
    } >= FREE_FILES | LIGHT_RUNTIME | LIGHT_MODEL


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

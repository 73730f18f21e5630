"""The package's shape: short functions and files, one class a name, no room that holds everything."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import shardwright

PACKAGE = Path(shardwright.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))

FUNCTION_LINES, FUNCTION_BRANCHES, FILE_LINES, ROOM_SHARE = 60, 20, 400, 0.12
BRANCHES = (*(ast.If, ast.IfExp, ast.For, ast.While, ast.ExceptHandler, ast.comprehension, ast.match_case, ast.BoolOp),)


TREES = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in MODULES}


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{name}::{node.name}", node


def line_count(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def branches(function: ast.AST) -> int:
    """Where the code may go two ways, nested functions counted in."""
    return sum(isinstance(node, BRANCHES) for node in ast.walk(function))


def test_functions_are_short() -> None:
    sizes = {where: (line_count(node), branches(node)) for where, node in functions()}
    long = {where: size for where, size in sizes.items() if size[0] > FUNCTION_LINES or size[1] > FUNCTION_BRANCHES}
    assert long == {}


def test_files_are_short() -> None:
    lines = {path.relative_to(PACKAGE).as_posix(): len(path.read_text("utf-8").splitlines()) for path in MODULES}
    assert {name: count for name, count in lines.items() if count > FILE_LINES} == {}


def test_a_class_has_a_name_of_its_own() -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(name)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_no_room_holds_everything() -> None:
    lines = Counter[str]()
    for path in MODULES:
        lines[path.relative_to(PACKAGE).parts[0]] += len(path.read_text("utf-8").splitlines())
    room, most = lines.most_common(1)[0]
    assert most <= ROOM_SHARE * lines.total(), f"{room}: {most} of {lines.total()} lines"

"""Every name of this repository that code imports is there, also inside functions, in the programs
that tests write as text, and in the texts that monkeypatch and import_module take. Nothing is
imported: a move is checked in a second."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOMES = {"shardwright": ROOT / "compiler", "tests": ROOT, "tools": ROOT}
OURS = "|".join(HOMES)
TEXTS = {".md", ".j2", ".toml", ".yml", ".sh"}

DOTTED = re.compile(rf"(?:{OURS})(?:\.\w+)+")
RUN = re.compile(rf"-m ((?:{OURS})(?:\.\w+)*)")
IMPORT = re.compile(rf"\bfrom ((?:{OURS})(?:\.\w+)*) import (\w+(?:, \w+)*)")
NOT_NAMES = {"shardwright.py"}
MADE_UP = {"tests/tools/test_prove.py"}
"""Writes modules of its own."""


def file_of(module: str) -> Path | None:
    """A module's file, a package's __init__.py or its folder; None where there is none."""
    parts = module.split(".")
    place = HOMES[parts[0]].joinpath(*parts)
    found = (place.with_suffix(".py"), place / "__init__.py", place)
    return next((path for path in found if path.exists()), None)


@functools.cache
def names_in(path: Path) -> frozenset[str]:
    """Return the names that a module binds, in branches too; "*" if it answers for any name."""
    if path.is_dir():
        return frozenset()
    names: set[str] = set()
    waiting: list[ast.AST] = list(ast.parse(path.read_text(encoding="utf-8")).body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add("*" if node.name == "__getattr__" else node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        else:
            waiting += ast.iter_child_nodes(node)
    return frozenset(names)


def resolves(module: str, name: str = "") -> bool:
    """module, or module and a name in it that is a module of its own or bound there."""
    path = file_of(module)
    if path is None:
        return False
    return (
        not name
        or name == "*"
        or bool({name, "*"} & names_in(path))
        or file_of(f"{module}.{name}") is not None
    )


def text_resolves(dotted: str) -> bool:
    """A module, or a module, a name in it and attributes of that."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        if file_of(".".join(parts[:length])) is not None:
            return length == len(parts) or resolves(".".join(parts[:length]), parts[length])
    return False


def wanted(path: Path) -> Iterator[tuple[str, str]]:
    """(module, name or "") of imports; (dotted text, "?") of texts."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield from _in_text(text)
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (
                (alias.name, "") for alias in node.names if alias.name.split(".")[0] in HOMES
            )
        elif (
            isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in HOMES
        ):
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if DOTTED.fullmatch(node.value):
                yield node.value, "?"
            else:
                yield from _in_text(node.value)


def _in_text(text: str) -> Iterator[tuple[str, str]]:
    yield from ((module, "") for module in RUN.findall(text))
    imports = IMPORT.findall(text)
    for module, names in imports:
        yield from ((module, name) for name in names.split(", "))
    if imports:
        yield from _attributes(text)


def _attributes(text: str) -> Iterator[tuple[str, str]]:
    """Yield the names that a program in a text reads or replaces in modules of this repository."""
    try:
        program = ast.parse(text)
    except SyntaxError:
        return
    modules = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(program)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in HOMES
        for alias in node.names
    }
    for node in ast.walk(program):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = modules.get(node.value.id)
            if module is not None and file_of(module) is not None:
                yield module, node.attr


def missing(path: Path) -> list[str]:
    return [
        f"{module} {name}".strip(" ?")
        for module, name in wanted(path)
        if module not in NOT_NAMES
        and not (text_resolves(module) if name == "?" else resolves(module, name))
    ]


def files() -> list[Path]:
    code = [
        path for folder in ("compiler", "tests", "tools") for path in (ROOT / folder).rglob("*.py")
    ]
    texts = [
        path for folder in ("compiler", "docs", "templates") for path in (ROOT / folder).rglob("*")
    ]
    texts += [*ROOT.glob("*.md"), *ROOT.glob("*.toml")]
    return [*code, *(path for path in texts if path.suffix in TEXTS)]


def test_every_name_that_is_imported_is_there() -> None:
    left_out = {Path(__file__), *(ROOT / name for name in MADE_UP)}
    found = {
        str(path.relative_to(ROOT)): names
        for path in files()
        if path not in left_out and (names := missing(path))
    }
    assert found == {}


def test_import_linter_and_mypy_name_what_is_there() -> None:
    named = re.findall(
        r'"(shardwright(?:\.\w+)+)(?:\.\*)?"', (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    )
    assert named and [name for name in named if file_of(name) is None] == []


def test_make_runs_what_is_there() -> None:
    modules = re.findall(
        rf"-m ((?:{OURS})(?:\.\w+)*)", (ROOT / "Makefile").read_text(encoding="utf-8")
    )
    assert modules and [name for name in modules if file_of(name) is None] == []


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("import shardwright.runtime.nothing", ["shardwright.runtime.nothing"]),
        (
            "def f():\n    from shardwright.cost.layer_shapes import nothing",
            ["shardwright.cost.layer_shapes nothing"],
        ),
        ("from shardwright.cost import layer_shapes", []),
        ("from shardwright import Session", []),
        ("p = 'tests.figures.nothing'", ["tests.figures.nothing"]),
        ("p = 'tests.figures.worst_of_ranks.anything'", []),
        ("p = 'import sys; from tests.figures import as_json, nothing'", ["tests.figures nothing"]),
        ("p = 'python -m tests.prove'", ["tests.prove"]),
        (
            "p = 'from shardwright.cost import layer_shapes as a; a.nothing = a.model_shapes'",
            ["shardwright.cost.layer_shapes nothing"],
        ),
    ],
)
def test_the_search_finds_what_is_gone(source: str, named: list[str], tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(source)
    assert missing(tmp_path / "a.py") == named

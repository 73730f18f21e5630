"""What `make test-light` and `make lint-light` take under another Python, where there is no torch.

python -m tools.light requirements   a requirement a line
python -m tools.light tests          the test files that this Python can run
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOMES = {"shardwright": ROOT / "compiler", "tests": ROOT, "tools": ROOT}

HEAVY = {"deepspeed", "torch", "transformers"}
TOOLS = {"hypothesis", "import-linter", "pytest", "pytest-xdist", "ruff"}

LATER: dict[str, str] = {}
"""Test files whose tests come to torch when they run: through an import inside a function, or in a command that they
start. `make test-light` fails where one is missing here."""


def requirements() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = [*project["optional-dependencies"]["test"], *project["optional-dependencies"]["dev"]]
    needed = [r for r in project["dependencies"] if _name(r) not in HEAVY]
    return needed + [r for r in extras if _name(r) in TOOLS]


def _name(requirement: str) -> str:
    return re.split(r"[^\w-]", requirement, maxsplit=1)[0].lower()


def light_tests() -> list[str]:
    """Test files that import nothing that is not installed, themselves or through what they import of this
    repository, and that LATER does not name."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    names = {path.relative_to(ROOT).as_posix(): path for path in files}
    return [name for name, path in names.items() if name not in LATER and _installed(path)]


def _installed(test: Path) -> bool:
    seen: set[Path] = set()
    waiting = [test]
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        for module in _imported(path):
            if module.split(".")[0] in HOMES:
                waiting += _files(module)
            elif not _is_there(module.split(".")[0]):
                return False
    return True


@functools.cache
def _is_there(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _files(module: str) -> list[Path]:
    """The module's file and the __init__.py of the packages above it."""
    parts = module.split(".")
    places = [HOMES[parts[0]].joinpath(*parts[: i + 1]) for i in range(len(parts))]
    found = [*(place / "__init__.py" for place in places), places[-1].with_suffix(".py")]
    return [path for path in found if path.exists()]


@functools.cache
def _imported(path: Path) -> tuple[str, ...]:
    return tuple(_imports(ast.parse(path.read_text(encoding="utf-8"))))


def _imports(tree: ast.Module) -> Iterator[str]:
    """What importing the module imports: function bodies and TYPE_CHECKING are skipped."""
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            waiting += ast.iter_child_nodes(node)


if __name__ == "__main__":
    print("\n".join({"requirements": requirements, "tests": light_tests}[sys.argv[1]]()))

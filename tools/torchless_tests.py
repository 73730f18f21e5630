"""What `make test-light` and `make lint-light` take under another Python, where there is no torch.

python -m tools.torchless_tests requirements   a requirement a line
python -m tools.torchless_tests tests          the test files that this Python can run
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

COMMANDS = {
    "tests/cli/test_bad_input.py",
    "tests/lint/test_probes.py",
    "tests/packaging/test_distributions.py",
    "tests/unit/checkpoint/test_fits.py",
    "tests/unit/prove/test_pieces.py",
    "tests/unit/test_warm.py",
}
"""Test files that start commands which import what is not there, or ask for its version."""
RUN_PACKAGES = {"calibrate", "compile", "export", "generate", "prepare", "run", "tune", "verify"}
"""Commands of `shardwright` that need the packages, or record their versions: main(["compile",
...]) in a test."""
FALSE_POSITIVES = {
    "tests/lint/test_command.py",
    "tests/lint/test_fuzz.py",
    "tests/unit/answers/test_breakdown.py",
    "tests/unit/answers/test_why_not.py",
    "tests/unit/layout/test_gpu_cluster.py",
    "tests/unit/cost/test_kernels.py",
    "tests/unit/data/test_prepare.py",
    "tests/unit/data/test_rows.py",
}
"""Test files whose tests do not come to the functions that import it."""


def requirements() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = [*project["optional-dependencies"]["test"], *project["optional-dependencies"]["dev"]]
    needed = [r for r in project["dependencies"] if _name(r) not in HEAVY]
    return needed + [r for r in extras if _name(r) in TOOLS]


def _name(requirement: str) -> str:
    return re.split(r"[^\w-]", requirement, maxsplit=1)[0].lower()


def light_tests() -> list[str]:
    """Test files that import nothing that is not installed, themselves or through what they import
    of this repository, in functions too."""
    files = {
        path.relative_to(ROOT).as_posix(): path
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
    }
    return [
        name
        for name, path in files.items()
        if name in FALSE_POSITIVES or (name not in COMMANDS and _installed(path))
    ]


def _installed(test: Path) -> bool:
    seen: set[Path] = set()
    waiting = [test]
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        waiting += _workers(path)
        for module in _imported(path):
            if module.split(".")[0] in HOMES:
                waiting += _files(module)
            elif not _is_there(module.split(".")[0]):
                return False
    return all(map(_is_there, HEAVY)) or not _runs_packages(test)


def _workers(path: Path) -> list[Path]:
    """List the scripts beside a test that it names, to start them as ranks."""
    names = re.findall(r'"(\w+_worker\.py)"', path.read_text(encoding="utf-8"))
    return [place for place in map(path.with_name, names) if place.exists()]


def _runs_packages(test: Path) -> bool:
    lists = (
        node
        for node in ast.walk(ast.parse(test.read_text(encoding="utf-8")))
        if isinstance(node, ast.List)
    )
    first = (node.elts[0] for node in lists if node.elts)
    return any(isinstance(word, ast.Constant) and word.value in RUN_PACKAGES for word in first)


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
    """What the module imports, now or when a function runs; not under TYPE_CHECKING."""
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
        else:
            waiting += ast.iter_child_nodes(node)


if __name__ == "__main__":
    print("\n".join({"requirements": requirements, "tests": light_tests}[sys.argv[1]]()))

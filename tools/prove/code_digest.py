"""A digest of the code that a figure speaks of: what it does, not how it is commented."""

from __future__ import annotations

import ast
import functools
import hashlib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "compiler" / "shardwright"
ENGINES = ("torch", "transformers", "deepspeed")

# Written from what the proofs measured: a figure that changed its own digest would always be old.
MADE_BY_PROOFS = {
    "vlm_support.json",
    "support.json",
    "tensor_verified.json",
    "tensor_unsplit.json",
    "prediction_errors.json",
}


def code_digest(source_paths: tuple[str, ...], tests: tuple[str, ...]) -> str:
    """source_paths: folders and files under compiler/shardwright. tests: pytest's arguments. Raises
    FileNotFoundError for a path that is not there: the table of pieces is wrong."""
    files = {file for name in source_paths for file in _files(PACKAGE / name)}
    for test in tests:
        files |= _with_imports(ROOT / test.partition("::")[0])
    whole = hashlib.sha256()
    for engine in ENGINES:
        whole.update(f"{engine} {metadata.version(engine)}\n".encode())
    for file in sorted(files):
        whole.update(f"{file.relative_to(ROOT).as_posix()} {_content(file)}\n".encode())
    return whole.hexdigest()[:16]


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(path)
    return [
        file
        for file in path.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts and file.name not in MADE_BY_PROOFS
    ]


def _with_imports(path: Path) -> set[Path]:
    """A test module, what it imports of tests/ and tools/, and the workers beside it that it starts
    by their names."""
    found: set[Path] = set()
    left = [path]
    while left:
        file = left.pop()
        if file not in found:
            found.add(file)
            left += _imports(file)
    return found


@functools.cache
def _imports(file: Path) -> list[Path]:
    found: list[Path] = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.split(".")[0] in ("tests", "tools")
        ):
            place = ROOT.joinpath(*node.module.split("."))
            found += [
                f
                for f in (place.with_suffix(".py"), *(place / f"{a.name}.py" for a in node.names))
                if f.exists()
            ]
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value.endswith(".py")
        ):
            beside = file.parent / Path(node.value).name
            if beside.exists():
                found.append(beside)
    return found


@functools.cache
def _content(file: Path) -> str:
    data = file.read_bytes()
    if file.suffix == ".py":
        tree = ast.parse(data)
        for node in ast.walk(tree):
            _drop_docstrings(node)
        data = ast.dump(tree).encode()
    return hashlib.sha256(data).hexdigest()


def _drop_docstrings(node: ast.AST) -> None:
    """Strings that stand alone, wherever they are; they do nothing."""
    body = getattr(node, "body", None)
    if isinstance(body, list):
        body[:] = [
            line
            for line in body
            if not (
                isinstance(line, ast.Expr)
                and isinstance(line.value, ast.Constant)
                and isinstance(line.value.value, str)
            )
        ]

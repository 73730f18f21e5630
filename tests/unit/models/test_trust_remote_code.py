"""transformers asks on the terminal whether to run a stranger's code, unless each call says that it
is not to."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import shardwright

LOADERS = ("from_pretrained", "from_config")
DATA_ALONE = ("GenerationConfig", "AutoHfQuantizer")
"""Their loaders take no trust_remote_code: they read JSON and choose among transformers' own
classes."""


def _calls(path: Path) -> Iterator[ast.Call]:
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.Call)
            and isinstance(called := node.func, ast.Attribute)
            and called.attr in LOADERS
            and ast.unparse(called.value) not in DATA_ALONE
        ):
            yield node


def test_every_load_says_that_no_strangers_code_is_run() -> None:
    package = Path(shardwright.__file__).parent
    calls = [(path, call) for path in package.rglob("*.py") for call in _calls(path)]
    assert len(calls) >= 9
    for path, call in calls:
        values = [
            ast.unparse(keyword.value)
            for keyword in call.keywords
            if keyword.arg == "trust_remote_code"
        ]
        assert values == ["False"], f"{path}:{call.lineno}"

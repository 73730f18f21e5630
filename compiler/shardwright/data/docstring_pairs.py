"""Write the built-in preference data (`path: python-docstrings`): a short and a long answer to what
a function of the Python standard library does, of which the short one is preferred."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

from shardwright.utils.file_io import write_atomically

PAIRS = 1000
SHORT, LONG = (20, 60), (61, 100)
"""Least and most characters of a chosen and of a rejected answer."""
_SENTENCE = re.compile(r"(?<=[.!?])\s+")


def write_docstring_pairs(folder: Path, sources: list[str]) -> Path:
    """Write data.jsonl in `folder`, in the order of the source files; existing data stays."""
    written = folder / "data.jsonl"
    if written.is_file():
        return written
    pairs: dict[str, dict[str, str]] = {}
    for source in sources:
        for name, docstring in _docstrings(Path(source)):
            pair = _pair(name, docstring)
            if pair is not None:
                pairs.setdefault(pair["prompt"], pair)
        if len(pairs) >= PAIRS:
            break
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(pair) for pair in list(pairs.values())[:PAIRS]]
    write_atomically(written, "\n".join(lines) + "\n")
    return written


def _docstrings(source: Path) -> Iterator[tuple[str, str]]:
    """Yield (name, docstring) of each function and class of a file that this Python parses."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and (text := ast.get_docstring(node)):
            yield node.name, text


def _pair(name: str, docstring: str) -> dict[str, str] | None:
    """Return a record, None where the docstring has no short first sentence and a longer text."""
    sentences = _SENTENCE.split(" ".join(docstring.split()))
    chosen = sentences[0]
    rejected = ""
    for sentence in sentences:
        if len(rejected) + len(sentence) > LONG[1]:
            break
        rejected = f"{rejected} {sentence}".strip()
    if not (SHORT[0] <= len(chosen) <= SHORT[1] and LONG[0] <= len(rejected) <= LONG[1]):
        return None
    # A line ends an answer: the byte tokenizer has no token for it.
    return {
        "prompt": f"What does {name} do? ",
        "chosen": f"{chosen}\n",
        "rejected": f"{rejected}\n",
    }

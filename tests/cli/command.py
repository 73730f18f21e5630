"""The real command in a process of its own, and what must hold for every refusal."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

GOOD = """\
version: 1
name: tiny
model:
  config: {model_type: llama, vocab_size: 256, hidden_size: 64, intermediate_size: 128,
           num_hidden_layers: 2, num_attention_heads: 8, num_key_value_heads: 8}
  weights: random
cluster:
  nodes: 1
  gpus_per_node: 4
  gpu: cpu
training:
  sequence_length: 128
  global_batch_size: 8
  steps: 20
  precision: fp32
data: {kind: synthetic}
"""

MANY = """\
import json, sys
from shardwright.cli.main import main
for arguments in json.loads(sys.argv[1]):
    code = main(arguments)
    for stream in (sys.stdout, sys.stderr):
        print(f"=== {code}", file=stream, flush=True)
"""
"""Several commands in one process: torch is imported once."""


def shardwright(
    *arguments: str | Path,
    cwd: Path,
    input: str | None = None,
    env: Mapping[str, str] | None = None,
    preexec_fn: Callable[[], None] | None = None,
) -> subprocess.CompletedProcess[str]:
    _skip_without_packages(arguments)
    return _python(["-m", "shardwright", *map(str, arguments)], cwd, input, env, preexec_fn)


def shardwright_many(
    commands: Sequence[Sequence[str | Path]], *, cwd: Path
) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of each."""
    import json

    for command in commands:
        _skip_without_packages(command)
    done = _python(
        ["-c", MANY, json.dumps([[str(word) for word in command] for command in commands])], cwd
    )
    assert done.returncode == 0, done.stderr
    mark = re.compile(r"=== (\d+)\n")
    out, errors = mark.split(done.stdout), mark.split(done.stderr)
    return [(int(out[i + 1]), out[i], errors[i]) for i in range(0, len(out) - 1, 2)]


def _skip_without_packages(command: Sequence[str | Path]) -> None:
    if command[0] == "compile":
        pytest.importorskip("deepspeed", reason="a plan records the version of its packages")


def _python(
    arguments: list[str],
    cwd: Path,
    input: str | None = None,
    env: Mapping[str, str] | None = None,
    preexec_fn: Callable[[], None] | None = None,
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "NO_COLOR": "1", **(env or {})}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command,
        input=input,
        stdin=subprocess.DEVNULL if input is None else None,
        cwd=cwd,
        env=environment,
        preexec_fn=preexec_fn,
        capture_output=True,
        text=True,
        timeout=240,
    )


def changed(old: str, new: str) -> str:
    assert GOOD.count(old) == 1, old
    return GOOD.replace(old, new)


def findings(text: str) -> list[tuple[str, str, str]]:
    """(code, file:line:column or file or "", what the caret points at) of each error block."""
    found = []
    for block in re.split(r"(?=^(?:error|warning)\[)", text, flags=re.M)[1:]:
        code = re.match(r"error\[(SW\d{4})\]: \S", block)
        if code is None:
            continue
        place = re.search(r"^ *--> (.+)$", block, re.M)
        pointed = ""
        if caret := re.search(r"^( *\d+ \| )(.*)\n *\| ( *)(\^+)$", block, re.M):
            # The line stands after "N | ", the carets after the same width.
            pointed = caret[2][len(caret[3]) : len(caret[3]) + len(caret[4])]
        help = re.search(r"^  = help: (.+)$", block, re.M)
        assert help and len(help[1]) > 10, f"no useful help:\n{block}"
        found.append((code[1], place[1] if place else "", pointed))
    return found


def refused(code: int, stdout: str, stderr: str) -> list[tuple[str, str, str]]:
    """Asserts that this is a clean refusal; its findings."""
    assert code == 1, (code, stdout, stderr)
    assert "Traceback" not in stdout + stderr and "our fault" not in stderr, stderr
    assert "written" not in stdout and not re.search(r"^(ok|next)\b", stdout, re.M), stdout
    found = findings(stderr)
    assert found, stderr
    return found


def tree(folder: Path) -> dict[str, bytes | None]:
    """Everything below, temporary files included."""
    return {
        str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None
        for p in sorted(folder.rglob("*"))
    }

"""Megatron-LM's own argument parser, asked without a GPU.

megatron-core has it in its wheels from 0.17 on, for Python 3.12; this imports an unpacked wheel
under any Python.

python -m tools.generate.megatron_argument_parser writes lint/megatron_options.json where it is of
another version than the wheel; with FOLDER options, in any case. With FOLDER ask, it reads lines
{"world": N, "args": [...]} and prints {} or {"error": ...}.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import types
import typing
import zipfile
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

ROOT = Path(__file__).resolve().parents[2]
VERSION = "0.19.0"
UNPACKED = ROOT / "build" / f"megatron-core-{VERSION}"
OPTIONS = ROOT / "compiler/shardwright/lint/megatron_options.json"


def unpacked() -> Path:
    """The wheel's folder, downloaded the first time (2.4 MB)."""
    if not UNPACKED.exists():
        target = UNPACKED.with_name("wheels")
        wanted = [
            "--no-deps",
            "--only-binary=:all:",
            "--python-version",
            "3.12",
            f"megatron-core=={VERSION}",
        ]
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "-q", *wanted, "-d", str(target)], check=True
        )
        (wheel,) = target.glob(f"megatron_core-{VERSION}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(UNPACKED)
    return UNPACKED


def module(folder: Path) -> Any:
    """megatron.training.arguments of that folder, in a process that has imported no megatron
    yet."""
    import typing_extensions

    for name in ("triton", "triton.language"):  # kernels that are never started
        stub = MagicMock()
        stub.__spec__, stub.__version__ = None, "3.4.0"
        sys.modules[name] = stub
    typing.override = typing_extensions.override  # type: ignore[attr-defined,unused-ignore]  # of Python 3.12
    sys.path.insert(0, str(folder))
    from shardwright.engines.megatron.megatron_cpu_patches import patch_torch_for_cpu

    patch_torch_for_cpu()
    import torch

    cuda: Any = torch.cuda
    cuda.is_available, cuda.device_count = lambda: True, lambda: 8
    cuda.get_device_capability = lambda *device: (9, 0)
    cuda.get_device_properties = lambda *device: types.SimpleNamespace(
        major=9, minor=0, total_memory=80 * 2**30
    )
    from megatron.training import arguments

    return arguments


def written(arguments: Any) -> str:
    """options.json: option -> [how many values, their type, the words that it takes]."""
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    found: dict[str, Any] = {}
    for action in parser._actions:
        kind = {int: "int", float: "float"}.get(action.type, "text")
        count = 1 if action.nargs is None else action.nargs
        found |= {
            name: [count, kind, [getattr(c, "name", c) for c in action.choices or ()]]
            for name in action.option_strings
        }
    rows = [
        f"  {json.dumps(n)}: {json.dumps(found[n])}"
        for n in sorted(found)
        if n not in ("-h", "--help")
    ]
    return f'{{"megatron_core": "{VERSION}",\n"options": {{\n' + ",\n".join(rows) + "\n}}\n"


def main() -> None:
    out, sys.stdout = sys.stdout, sys.stderr  # the parser prints
    if len(sys.argv) == 1:
        if json.loads(OPTIONS.read_text(encoding="utf-8"))["megatron_core"] == VERSION:
            return
        sys.argv += [str(unpacked()), "options"]
    from shardwright.engines.megatron.installed_parser import answer_question

    arguments = module(Path(sys.argv[1]))
    if sys.argv[2] == "options":
        OPTIONS.write_text(written(arguments), encoding="utf-8")
        return
    for line in sys.stdin:
        print(json.dumps(answer_question(arguments, json.loads(line))), file=out, flush=True)


if __name__ == "__main__":
    main()

"""Ask the installed Megatron-LM's own parser and validate_args about options.

megatron-core has them from 0.17 on. They import torch and ask for a GPU, so `ask_installed_parser`
starts a process for them: this file, as a program.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Sequence
from types import ModuleType
from typing import Any

TIMEOUT_SECONDS = 180


def is_parser_installed() -> bool:
    """Return whether Megatron-LM's training arguments can be imported; imports none of them."""
    try:
        return importlib.util.find_spec("megatron.training") is not None
    except (ImportError, ValueError):
        return False


def ask_installed_parser(options: Sequence[str], world_size: int) -> dict[str, str]:
    """Return {} where validate_args accepts the options; else {"error"}, with "at" and "assertion"
    where an assertion of Megatron-LM refuses them. {"unasked": cause} where it cannot be asked."""
    question = json.dumps({"world": world_size, "args": list(options)})
    command = [sys.executable, "-m", "shardwright.engines.megatron.installed_parser"]
    try:
        done = subprocess.run(
            command, input=question, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"unasked": type(error).__name__}
    try:
        answer: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        last = done.stderr.strip().splitlines()[-1:] or [f"it ended with {done.returncode}"]
        return {"unasked": last[0]}
    return answer


def answer_question(arguments: ModuleType, question: dict[str, Any]) -> dict[str, str]:
    """Return what `megatron.training.arguments` says of {"world", "args"}; changes sys.argv and the
    environment."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(question["world"])}
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    sys.argv = ["pretrain_gpt.py", *question["args"]]
    try:
        arguments.validate_args(arguments.parse_args(), {})
    except (Exception, SystemExit) as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
        last = traceback.extract_tb(error.__traceback__)[-1]
        if isinstance(error, AssertionError | ValueError) and last.filename == arguments.__file__:
            answer["at"] = f"megatron/training/arguments.py:{last.lineno}"
            answer["assertion"] = str(error) or last.line or type(error).__name__
        return answer
    return {}


def main() -> None:
    """Answer the question on standard input; what Megatron prints goes to standard error."""
    out, sys.stdout = sys.stdout, sys.stderr
    from megatron.training import arguments

    print(json.dumps(answer_question(arguments, json.load(sys.stdin))), file=out)


if __name__ == "__main__":
    main()

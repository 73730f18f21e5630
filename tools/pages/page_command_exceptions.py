"""Commands that the quick test does not run as the pages have them: the reason, and what is done
instead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LEFT_OUT = "...\n"


@dataclass(frozen=True)
class CommandException:
    """How a command is tried.

    target: `make -n` has to know it. prove: it runs in `make prove`; in the quick test its
    arguments are parsed, and `part`, a command of it, has to print what the page shows up to the
    first `...`. refused: it has nothing to do where the page is followed line by line, and says so
    with exit code 1.
    """

    how: Literal["target", "prove", "refused"]
    reason: str
    part: str = ""


def part_of(shown: str) -> str:
    """What stands before the first `...` of an output; one at its very beginning does not count."""
    return shown.removeprefix(LEFT_OUT).partition(LEFT_OUT)[0]


FRESH = "writes what tests compare already: they fail with this command's name where it is stale"
CHANGES = "writes into the repository"
EXCEPTIONS: dict[tuple[str, str], CommandException] = {
    ("README.md", "make demo"): CommandException(
        "prove",
        "150 steps on four ranks, two minutes",
        part="shardwright compile recipes/tiny-llama-cpu.yaml -o build/demo",
    ),
    ("docs/tour.md", "shardwright stop build/tiny"): CommandException(
        "refused", "the run above it has ended by itself"
    ),
    ("docs/vision.md", "shardwright run build/sight"): CommandException(
        "prove",
        "250 steps on four ranks, two minutes; tests/launch/test_tiny_vision.py has it, too",
    ),
    **{
        ("docs/vision.md", f"shardwright {command}"): CommandException(
            "prove", "asks for what the run above has trained"
        )
        for command in (
            "generate build/sight/checkpoints/step-00000250 --image "
            "build/held-out/pictures/00002-triangle.png "
            '--prompt "What is it?" --tokens 9',
            "export build/sight/checkpoints/step-00000250 -o build/sight-hf",
        )
    },
    ("docs/tour.md", "shardwright verify my.yaml"): CommandException(
        "prove", "two launches; tests/verify has its own"
    ),
    (
        "docs/python-api.md",
        "deepspeed --no_local_rank --num_gpus 4 loop.py build/loop",
    ): CommandException(
        "prove", "a launch; tests/launch/test_own_loop.py trains with the same script"
    ),
    **{
        ("docs/troubleshooting.md", f"shardwright {command} build/tiny{option}"): CommandException(
            "prove",
            "a launch of a few minutes; tests/launch/test_detached.py has the smallest of the same",
        )
        for command, option in (("run", " --detach"), ("status", ""), ("logs", ""), ("stop", ""))
    },
    ("CONTRIBUTING.md", "make setup"): CommandException(
        "target", "installs what the tests run with"
    ),
    ("CONTRIBUTING.md", "make test"): CommandException("target", "runs these tests"),
    ("CONTRIBUTING.md", "make test-more"): CommandException("target", "runs these tests"),
    ("CONTRIBUTING.md", "make test-light PYTHON=python3.12"): CommandException(
        "target", "runs some of these tests"
    ),
    ("CONTRIBUTING.md", "make lint-light PYTHON=python3.12"): CommandException(
        "target", "runs beside the tests in .ci/run"
    ),
    ("CONTRIBUTING.md", "make prove"): CommandException("target", "runs for hours"),
    ("CONTRIBUTING.md", "make prove-list"): CommandException("target", "tests/unit/prove tries it"),
    ("CONTRIBUTING.md", "make proof"): CommandException("target", CHANGES),
    ("CONTRIBUTING.md", "make lint"): CommandException(
        "target", "runs beside the tests in .ci/run, over the same files"
    ),
    ("CONTRIBUTING.md", "make golden"): CommandException("target", FRESH),
    ("CONTRIBUTING.md", "make snapshot"): CommandException("target", CHANGES),
    ("CONTRIBUTING.md", "make lint-docs"): CommandException("target", FRESH),
    ("CONTRIBUTING.md", "make docs"): CommandException("target", FRESH),
    ("CONTRIBUTING.md", "make recipes"): CommandException("target", FRESH),
    ("CONTRIBUTING.md", "make readme"): CommandException("target", FRESH),
    ("CONTRIBUTING.md", "make graphs"): CommandException("target", CHANGES),
    ("CONTRIBUTING.md", "make bench-gpu"): CommandException(
        "target", "wants a GPU; tests/launch/test_bench_gpu.py tries it"
    ),
}
"""(page, command) -> what is done instead."""

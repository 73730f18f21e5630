"""The fenced blocks of the repository's pages, and the commands in them."""

from __future__ import annotations

import argparse
import contextlib
import doctest
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from markdown_it import MarkdownIt

from shardwright.cli.main import COMMANDS
from shardwright.cli.main import main as shardwright

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("docs", "recipes", "compiler", "templates", "tests", "tools", "benchmarks")
_HEREDOC = re.compile(r"<<'?(\w+)'?")
_COMMENT = re.compile(r"\s+# .*")


@dataclass(frozen=True)
class Block:
    """language, title: the first word after the fence, and the rest: the file that a reader saves
    the text as."""

    page: str
    line: int
    language: str
    title: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Command:
    """text: without prompt and comment, with the lines that are its input. shown: what the page
    says it prints.

    typed: its lines as they stand on the page.
    """

    text: str
    typed: str
    shown: str | None


def pages() -> list[str]:
    """Every page of the repository, by its path from the root."""
    found = [
        *ROOT.glob("*.md"),
        *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md")),
    ]
    return sorted(str(path.relative_to(ROOT)) for path in found)


def blocks(page: str) -> list[Block]:
    """In the order of the page. Their text ends with a line break, their lines count from 1."""
    found = []
    for token in MarkdownIt().parse((ROOT / page).read_text(encoding="utf-8")):
        if token.type in ("fence", "code_block"):
            assert token.map is not None
            language, _, title = token.info.strip().partition(" ")
            found.append(Block(page, token.map[0] + 1, language, title.strip(), token.content))
    return found


def inline_commands(page: str) -> Iterator[str]:
    """What stands in the running text as `shardwright ...`."""
    for token in MarkdownIt().enable("table").parse((ROOT / page).read_text(encoding="utf-8")):
        for child in token.children or ():
            if child.type == "code_inline" and child.content.startswith("shardwright "):
                yield child.content


def commands(block: Block) -> list[Command]:
    """Of a `sh` block each, of a `console` block those after a prompt, each with the lines below
    it."""
    if block.language == "console":
        return list(_session(block.text))
    return list(_script(block.text)) if block.language == "sh" else []


def _script(text: str) -> Iterator[Command]:
    """A command a line, apart from here-documents."""
    lines = iter(text.splitlines())
    for line in lines:
        typed = line
        if opened := _HEREDOC.search(line):
            for more in lines:
                typed += "\n" + more
                if more == opened[1]:
                    break
        if _command(typed):
            yield Command(_command(typed), typed, None)


def _session(text: str) -> Iterator[Command]:
    parts = re.split(r"^((?:\$ .*\n)(?:> .*\n)*)", text, flags=re.MULTILINE)
    assert parts[0] == "", f"a prompt is missing before {parts[0]!r}"
    for typed, shown in zip(parts[1::2], parts[2::2], strict=True):
        yield Command(
            _command(re.sub(r"^[$>] ", "", typed, flags=re.MULTILINE).rstrip()), typed, shown
        )


def _command(typed: str) -> str:
    first, *rest = typed.split("\n")
    return "\n".join([_COMMENT.sub("", f" {first}").strip(), *rest])


# Commands that the quick test does not run as the pages have them: the reason, and what is done
# instead.


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
EXCEPTIONS: dict[tuple[str, str], CommandException] = {
    ("README.md", "make demo"): CommandException(
        "prove",
        "150 steps on four ranks, two minutes",
        part="shardwright compile recipes/tiny-llama-cpu.yaml -o build/demo",
    ),
    ("docs/tour.md", "shardwright stop build/tiny"): CommandException(
        "refused", "the run above it has ended by itself"
    ),
    ("docs/vision.md", "shardwright run build/vlm"): CommandException(
        "prove",
        "250 steps on four ranks, two minutes; tests/launch/test_tiny_vision.py has it, too",
    ),
    **{
        ("docs/vision.md", f"shardwright {command}"): CommandException(
            "prove", "asks for what the run above has trained"
        )
        for command in (
            "generate build/vlm/checkpoints/step-00000250 --image "
            "build/held-out/pictures/00002-triangle.png "
            '--prompt "What is it?" --tokens 9',
            "export build/vlm/checkpoints/step-00000250 -o build/vlm-hf",
        )
    },
    ("docs/tour.md", "shardwright verify my.yaml"): CommandException(
        "prove", "two launches; tests/verify has its own"
    ),
    (
        "docs/python-api.md",
        "deepspeed --no_local_rank --num_gpus 4 loop.py build/loop",
    ): CommandException(
        "prove", "a launch; tests/launch/test_custom_training_loop.py trains with the same script"
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
    ("CONTRIBUTING.md", "make test-light PYTHON=python3.13"): CommandException(
        "target", "runs some of these tests"
    ),
    ("CONTRIBUTING.md", "make lint-light PYTHON=python3.13"): CommandException(
        "target", "runs beside the tests in .ci/run"
    ),
    ("CONTRIBUTING.md", "make prove"): CommandException("target", "runs for hours"),
    ("CONTRIBUTING.md", 'make prove FOR="checkpoint vision"'): CommandException(
        "target", "runs for an hour; tests/tools/test_prove.py tries it"
    ),
    ("CONTRIBUTING.md", "make proof-page"): CommandException(
        "target", "tests/tools/test_prove.py and tests/zoo/test_matrix.py try it"
    ),
    ("CONTRIBUTING.md", "make test-newest"): CommandException(
        "target", "installs the newest versions of everything"
    ),
    ("CONTRIBUTING.md", "make prove-list"): CommandException(
        "target", "tests/tools/test_prove.py tries it"
    ),
    ("CONTRIBUTING.md", "make lint"): CommandException(
        "target", "runs beside the tests in .ci/run, over the same files"
    ),
    ("CONTRIBUTING.md", "make generated"): CommandException("target", FRESH),
    ("CONTRIBUTING.md", "make bench-gpu"): CommandException(
        "target", "wants a GPU; tests/launch/test_bench_gpu.py tries it"
    ),
}
"""(page, command) -> what is done instead."""

# A reader who follows a page: its commands in a scratch folder that looks like the repository's
# root.


LINKED = (
    "Makefile",
    "pyproject.toml",
    "constraints.txt",
    "compiler",
    "templates",
    "tests",
    "tools",
    "benchmarks",
)
IN_A_PROCESS = ("run", "stop", "verify", "doctor")
# The hosts of the pages exist nowhere, with or without an ssh client and a name server here.
SSH = """#!/bin/sh
for word; do
  case $word in *.invalid)
    echo "ssh: Could not resolve hostname $word: Name or service not known" >&2 ;;
  esac
done
exit 255
"""
_SHELL = re.compile(r"[|&;<>$*`\n]|^\.")
_CLOCKS = (
    (re.compile(r"searched in [\d.]+ s"), "searched in N s"),
    (re.compile(r"[\d,.]+ tokens/s$", re.MULTILINE), "N tokens/s"),
)


class Session:
    """One page's commands, from the first to the last: what one writes the next ones find."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(ROOT / "recipes", folder / "recipes")  # `plan --pin` writes into one
        for name in LINKED:
            (folder / name).symlink_to(ROOT / name)
        (folder / ".venv").symlink_to(sys.prefix)
        (folder / ".ssh").mkdir()
        (folder / ".ssh" / "ssh").write_text(SSH)
        (folder / ".ssh" / "ssh").chmod(0o755)

    def save(self, block: Block) -> None:
        """A block with a file's name, as the reader is told to save it."""
        if block.title:
            (self.folder / block.title).write_text(block.text, encoding="utf-8")

    def run(self, command: str) -> tuple[int, str]:
        """Exit code, and standard output and error as a terminal shows them."""
        words = shlex.split(command)
        if (
            words[0] == "shardwright"
            and words[1] not in IN_A_PROCESS
            and not _SHELL.search(command)
        ):
            return self._here(words[1:])
        path = f"{self.folder / '.ssh'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env={**os.environ, "PATH": path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
        )
        return done.returncode, done.stdout

    def _here(self, arguments: list[str]) -> tuple[int, str]:
        """In this process, which has imported already what a command needs."""
        printed = io.StringIO()
        with (
            contextlib.chdir(self.folder),
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(printed),
        ):
            code = shardwright(arguments)
        return code, printed.getvalue()


def same(shown: str, printed: str) -> bool:
    """Apart from times; `...` stands for whatever is left out, as in a doctest."""
    for pattern, word in _CLOCKS:
        shown, printed = pattern.sub(word, shown), pattern.sub(word, printed)
    return doctest.OutputChecker().check_output(shown, printed, doctest.ELLIPSIS)


def exit_code(shown: str | None) -> int:
    """That of a command with this output: 1 where something is refused or red."""
    return int(bool(re.search(r"^(error\[SW\d+\]|::error |red )", shown or "", re.MULTILINE)))


def parse(command: str) -> argparse.Namespace:
    """The arguments of a `shardwright ...` as its own parser reads them. Raises SystemExit for
    wrong ones."""
    _, name, *arguments = shlex.split(command)
    parser = argparse.ArgumentParser(prog=f"shardwright {name}", allow_abbrev=False)
    add_arguments, _ = COMMANDS[name].functions(name)
    add_arguments(parser)
    return parser.parse_args(arguments)

"""A reader who follows a page: its commands in a scratch folder that looks like the repository's
root."""

from __future__ import annotations

import argparse
import contextlib
import doctest
import importlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from shardwright.cli.main import COMMANDS
from shardwright.cli.main import main as shardwright
from tools.pages.page_blocks import ROOT, Block

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
    importlib.import_module(COMMANDS[name][0]).add_arguments(parser)
    return parser.parse_args(arguments)

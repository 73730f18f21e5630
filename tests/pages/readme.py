"""The outputs of commands that README.md shows: `make readme` runs them and writes what they print."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
from pathlib import Path

from shardwright.cli.main import main as shardwright

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "README.md"
BEGIN, END = "<!-- the output of the command -->\n```\n", "```\n<!-- end of the output -->"
CLOCK = re.compile(r"searched in [\d.]+ s")


def written(page: str) -> str:
    """`page` with every marked block as its command prints it from the repository's root."""
    before, *blocks = page.split(BEGIN)
    parts = [before]
    for block in blocks:
        shown, end, after = block.partition(END)
        prompt = shown.splitlines()[0]
        parts.append(f"{BEGIN}{prompt}\n{_kept_clock(shown, output(prompt))}{end}{after}")
    return "".join(parts)


def output(prompt: str) -> str:
    """Of a line like `$ shardwright plan ...`."""
    dollar, command, *arguments = shlex.split(prompt)
    assert (dollar, command) == ("$", "shardwright"), prompt
    printed, here = io.StringIO(), os.getcwd()
    os.chdir(ROOT)
    try:
        with contextlib.redirect_stdout(printed):
            assert shardwright(arguments) == 0, prompt
    finally:
        os.chdir(here)
    return printed.getvalue()


def _kept_clock(shown: str, now: str) -> str:
    """The seconds of a search are the machine's, so the page keeps those that it has."""
    old = CLOCK.search(shown)
    return now if old is None else CLOCK.sub(old[0], now)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

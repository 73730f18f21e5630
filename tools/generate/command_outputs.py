"""Runs the commands that the pages show, and writes what they print into the pages."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tools.pages.page_commands import (
    EXCEPTIONS,
    ROOT,
    Block,
    Session,
    blocks,
    commands,
    pages,
    part_of,
    same,
)


def written(page: str, folder: Path) -> str:
    """The page's text with every output that has changed as it is printed now. folder: an empty one
    to follow it in.

    An output that is the same apart from times and what `...` leaves out stays as it is.
    """
    session = Session(folder)
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines(keepends=True)
    for block, text in [(block, _now(block, session)) for block in blocks(page)][::-1]:
        lines[block.line : block.line + block.text.count("\n")] = [text]
    return "".join(lines)


def _now(block: Block, session: Session) -> str:
    """Runs the block's commands. Returns its text."""
    session.save(block)
    text = ""
    for command in commands(block):
        shown, instead = command.shown or "", EXCEPTIONS.get((block.page, command.text))
        if instead is None:
            text += command.typed + _fresh(shown, command.text, session)
        elif instead.part:
            old = part_of(shown)
            text += command.typed + shown.replace(old, _fresh(old, instead.part, session), 1)
        else:
            text += command.typed + shown
    return text if block.language == "console" else block.text


def _fresh(shown: str, command: str, session: Session) -> str:
    _, printed = session.run(command)
    return shown if same(shown, printed) else printed


if __name__ == "__main__":
    for page in pages():
        if any(block.language == "console" for block in blocks(page)):
            with tempfile.TemporaryDirectory() as folder:
                (ROOT / page).write_text(written(page, Path(folder)), encoding="utf-8")

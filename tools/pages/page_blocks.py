"""The fenced blocks of the repository's pages, and the commands in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

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

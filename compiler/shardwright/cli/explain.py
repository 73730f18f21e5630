"""`shardwright explain SW1234`: what a diagnostic code means, why it matters, and what to do instead."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwright.diagnostics.explain import Explanation

WIDTH = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("code", metavar="CODE", help="a code that a command has printed, such as SW4112")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    from shardwright.cli.console import error
    from shardwright.diagnostics.explain import explanation

    found = explanation(args.code.upper())
    if found is None:
        error(_no_code(args.code))
        return 1
    print(json.dumps(_object(found)) if args.json else page(found))
    return 0


def page(found: Explanation) -> str:
    """The text of one code; only its title where the registry has no more."""
    lines = [f"{found.code}: {found.title}"]
    for part in (found.what, found.why):
        if part:
            lines += ["", *textwrap.wrap(part, WIDTH, break_long_words=False, break_on_hyphens=False)]
    for title, text in (("Example", found.example), ("Instead", found.instead)):
        if text.strip():
            lines += ["", f"{title}:{_flags(found) if title == 'Example' else ''}", *_indented(text)]
    if found.source:
        lines += ["", *textwrap.wrap(f"Source: {found.source}", WIDTH, subsequent_indent="  ")]
    return "\n".join(lines)


def _indented(text: str) -> list[str]:
    """A long example in lines; one that is not JSON as it is."""
    if len(text) > WIDTH:
        with contextlib.suppress(ValueError):
            text = json.dumps(json.loads(text), indent=2)
    return [f"  {line}" for line in text.splitlines()]


def _flags(found: Explanation) -> str:
    flags = [f"--for {found.audience}"] * bool(found.audience)
    flags += [f"--world-size {found.world_size}"] * bool(found.world_size)
    return f" (lint {' '.join(flags)})" if flags else ""


def _object(found: Explanation) -> dict[str, str]:
    keys = ("code", "title", "what", "why", "example", "instead", "source")
    return {key: getattr(found, key) for key in keys}


def _no_code(word: str) -> str:
    import difflib

    from shardwright.diagnostics.codes import CODES

    if not re.fullmatch(r"SW\d{4}", word, re.IGNORECASE):
        return f"{word!r} is no code; a code is SW and four digits, as in `error[SW4112]`"
    close = difflib.get_close_matches(word.upper(), CODES, n=1)
    return f"there is no code {word.upper()}" + (f"; did you mean {close[0]}?" if close else "")

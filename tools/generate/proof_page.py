"""`make proof-page`: writes the table of docs/proof.md from what `make prove` found.

A row is replaced where a run under build/prove/ has its piece; the others stay. The last column is
counted anew.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from tests.figures import worst_of_cases
from tools.prove.proof_pieces import PIECES
from tools.prove.proof_results import ROOT, git, runs

PAGE = ROOT / "docs" / "proof.md"
BEGIN, END = "<!-- made by `make proof-page` -->", "<!-- end -->"
HEAD = (
    "| what is compared | date | commit | cases | largest deviation | commits since |",
    "|---|---|---|---|---|---|",
)
KEYS = {
    "loss": ("loss", "loss_absolute", "loss_difference"),
    "norm": ("norm", "norm_relative"),
    "weights": ("weights", "weight", "weight_absolute"),
}
"""What the page calls a deviation -> its names in a case. Norms are relative."""
WITHOUT_DEVIATION = {"verify", "noise-scale", "islands-network", "tiny-vision"}
"""Areas whose figures are not deviations of a layout: planted faults, noise, seconds, learning."""

WORDS = {"refused": "rejected", "not proved": "not verified"}
"""Verdict of a case that does not count as working -> the page's word."""

Rows = dict[str, list[str]]
"""Title -> date, commit, cases, largest deviation."""


def titles() -> dict[str, tuple[str, str]]:
    """Row title -> (piece, area); the area is empty where a piece records none."""
    found = {}
    for name, piece in PIECES.items():
        for area in piece.areas or ("",):
            title = f"{piece.title}: {area}" if len(piece.areas) > 1 else piece.title
            found[title] = (name, area)
    return found


def rows_of(page: str) -> Rows:
    """The rows that a page has."""
    table = page.partition(BEGIN)[2].partition(END)[0]
    lines = [line for line in table.splitlines() if line.startswith("|")][len(HEAD) :]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {title: values[:4] for title, *values in cells}


def measured(found: list[dict[str, Any]]) -> Rows:
    """The rows of runs, oldest first: of each piece that passed, its last."""
    rows = {}
    for run in found:
        for title, (piece, area) in titles().items():
            document = run["pieces"].get(piece, {"outcome": "not run"})
            if document["outcome"] == "passed":
                cases = document["cases"].get(area, {})
                commit = run["commit"][:10] + ("+" if run.get("uncommitted") else "")
                rows[title] = [
                    document["date"],
                    commit,
                    counted(cases) if cases else f"tests: {document['tests']}",
                    "" if area in WITHOUT_DEVIATION else deviation(cases),
                ]
    return rows


def counted(cases: Mapping[str, Mapping[str, Any]]) -> str:
    """How many cases there are, and how they ended."""
    answers = [
        case.get("verdict") or case.get("outcome") or _by_words(case) for case in cases.values()
    ]
    counts = Counter(answer for answer in answers if answer)
    if counts:
        well = counts.pop("proved", 0) + counts.pop("equal", 0)
        others = "".join(f", {n} {WORDS.get(word, word)}" for word, n in sorted(counts.items()))
        return f"{well} of {well + counts.total()} verified{others}"
    half = sum(not _is_fp32(name, case) for name, case in cases.items())
    return f"{len(cases) - half} in fp32, {half} in bf16 within 2 %" if half else f"{len(cases)}"


def _by_words(case: Mapping[str, Any]) -> str:
    """A case of words alone: verified in one way at least, or refused."""
    if not case or not all(isinstance(value, str) for value in case.values()):
        return ""
    return "proved" if "proved" in case.values() else "refused"


def deviation(cases: Mapping[str, Mapping[str, Any]]) -> str:
    """The largest of each kind, of verified fp32 cases; what was not finite is named so."""
    exact = [
        case
        for name, case in cases.items()
        if _is_fp32(name, case) and case.get("verdict", case.get("outcome")) not in WORDS
    ]
    parts = []
    for word, names in KEYS.items():
        found = [
            {"": case[name]}
            for case in exact
            for name in names
            if not isinstance(case.get(name, ""), str | list | dict)
        ]
        if found:
            worst = worst_of_cases(found, "")
            parts.append(f"{word} {worst:.1e}" if math.isfinite(worst) else f"{word} not finite")
    return ", ".join(parts)


def _is_fp32(name: str, case: Mapping[str, Any]) -> bool:
    words = f"{name} {case.get('words', '')} {case.get('precision', '')}"
    return "bf16" not in words


def since(commit: str) -> str:
    """How many commits came after it; a question mark where it is not in this history."""
    return git("rev-list", "--count", f"{commit.rstrip('+')}..HEAD") or "?"


def written(page: str, new: Rows) -> str:
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    rows = {**rows_of(page), **new}
    lines = [
        f"| {title} | {' | '.join(rows[title])} | {since(rows[title][1])} |"
        for title in titles()
        if title in rows
    ]
    return re.sub(" +\\|", " |", before + "\n".join([BEGIN, *HEAD, *lines, END]) + after)


def main() -> None:
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), measured(runs())), encoding="utf-8")


if __name__ == "__main__":
    main()

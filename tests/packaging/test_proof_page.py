"""The table of docs/proof.md has rows of pieces that there are."""

from __future__ import annotations

import re

from tools.generate.proof_page import BEGIN, PAGE, rows_of, titles


def test_the_table_has_a_row_of_every_piece_that_was_run() -> None:
    page = PAGE.read_text(encoding="utf-8")
    rows = rows_of(page)
    assert BEGIN in page and len(rows) > 50 and rows.keys() <= titles().keys()
    for title, (date, commit, cases, deviation) in rows.items():
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", date) and re.fullmatch(r"[0-9a-f]{10}\+?", commit)
        assert cases and "not finite" not in deviation and "wrong" not in cases, title

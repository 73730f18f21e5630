"""`make docs`: the pages that are made from the schema, the rules and the measurements, and their
figures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tools.pages import batch, cost, recipe, rules

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES: dict[str, Callable[[], str]] = {
    "recipe.md": recipe.page,
    "rules.md": rules.page,
    "cost-model.md": cost.page,
    "batch-size.md": batch.page,
    "batch-size.svg": batch.figure,
}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")

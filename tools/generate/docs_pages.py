"""The pages that are made from the schema, the rules and the measurements, and their figures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tools.generate import batch_size_page, cost_model_page, recipe_page, rules_page

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES: dict[str, Callable[[], str]] = {
    "recipe.md": recipe_page.page,
    "rules.md": rules_page.page,
    "cost-model.md": cost_model_page.page,
    "batch-size.md": batch_size_page.page,
    "batch-size.svg": batch_size_page.figure,
}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")

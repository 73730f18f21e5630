"""The predicted figures of golden plans: figures.json holds them for all cases, so that a constant
of the cost model that moves changes one file. expected/plan.json has 0 in their places."""

from __future__ import annotations

import json
from pathlib import Path

from shardwright.utils.json_values import JsonObject, JsonValue

FIGURES_FILE = Path(__file__).with_name("figures.json")
RELATIVE_TOLERANCE = 1e-6
Figures = dict[str, float]


def split_figures(plan: str) -> tuple[str, Figures]:
    """Return the text of plan.json with 0 for each predicted number, and those numbers by path."""
    document: JsonObject = json.loads(plan)
    figures: Figures = {}

    def zeroed(value: JsonValue, path: str) -> JsonValue:
        if isinstance(value, dict):
            return {key: zeroed(item, f"{path}.{key}") for key, item in value.items()}
        if isinstance(value, list):
            return [zeroed(item, f"{path}.{index}") for index, item in enumerate(value)]
        if isinstance(value, bool) or not isinstance(value, int | float):
            return value
        figures[path.removeprefix(".")] = value
        return type(value)(0)

    document = {**document, "predicted": zeroed(document["predicted"], "")}
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n", figures


def read_figures() -> dict[str, Figures]:
    found: dict[str, Figures] = json.loads(FIGURES_FILE.read_text(encoding="utf-8"))
    return found


def write_figures(figures: dict[str, Figures]) -> None:
    text = json.dumps(dict(sorted(figures.items())), indent=1)
    FIGURES_FILE.write_text(text + "\n", encoding="utf-8")

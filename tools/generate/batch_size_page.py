"""The table and the figure of docs/batch-size.md, from benchmarks/batch-size.json."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path
from typing import Any

from shardwright.utils.number_format import format_number
from tools.generate.sections import replace_section

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/batch-size.md"
STEPS = (
    "<!-- steps: made by `make generated` from benchmarks/batch-size.json -->",
    "<!-- end of steps -->",
)
NOISE = (
    "<!-- noise: made by `make generated` from benchmarks/batch-size.json -->",
    "<!-- end of noise -->",
)
COLOURS = ("#9ecae1", "#4292c6", "#2171b5", "#08306b")
WIDTH, HEIGHT, LEFT, TOP, PANEL, DEEP = 820, 320, 50, 30, 330, 240
HIGHEST, LOWEST = 3.2, 1.6
"""Losses at the ends of the axis."""


def bench() -> dict[str, Any]:
    return dict(json.loads((ROOT / "benchmarks/batch-size.json").read_text(encoding="utf-8")))


def page() -> str:
    text, found = PAGE.read_text(encoding="utf-8"), bench()
    for (begin, end), body in ((STEPS, steps(found)), (NOISE, noise(found))):
        text = replace_section(text, begin, end, body)
    return text


def steps(found: dict[str, Any]) -> str:
    """What each batch size needs to the target, and what the fit of both bills says of it."""
    fewest, both = found["fewest_steps"], found["both_bills_double"]
    lines = [
        (
            f"| sequences per batch | best learning rate | rates tried | steps to loss "
            f"{found['target']:g} | sequences | steps by the fit |"
        ),
        "|---|---|---|---|---|---|",
    ]
    for run in found["runs"]:
        batch, needed = run["batch"], run["steps"]
        fitted = fewest * (1 + both / batch)
        rates = ", ".join(f"{rate:g}" for rate in run["rates"])
        steps = f"{needed:,.0f} | {needed * batch:,.0f} | {fitted:,.0f}"
        lines.append(f"| {batch} | {run['rate']:g} | {rates} | {steps} |")
    return "\n".join(
        [
            f"Measured {found['date']} by `{found['command']}`. The fit is S = {fewest:,.0f} (1 + "
            f"{format_number(both)} / B). At B = {format_number(both)} sequences a run needs twice "
            "the minimum of steps and twice the minimum of sequences.",
            "",
            *lines,
        ]
    )


def noise(found: dict[str, Any]) -> str:
    lines = [
        (
            f"| steps of the run at {found['noise_batch']} sequences per batch | held-out loss | "
            "noise scale, sequences | 95 % interval |"
        ),
        "|---|---|---|---|",
    ]
    for part in found["noise"]:
        value = "unknown" if part["value"] is None else format_number(part["value"])
        upper = "more" if part["high"] is None else format_number(part["high"])
        interval = f"{format_number(part['low'])} to {upper}, of {part['measured']} steps"
        lines.append(
            f"| {part['first']} to {part['last']} | {part['loss']:.2f} | {value} | {interval} |"
        )
    return "\n".join(lines)


def figure() -> str:
    """Return docs/batch-size.svg: held-out loss against steps, and against sequences."""
    found = bench()
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" '
        'font-size="12" role="img">',
        "<title>Held-out loss against steps and against sequences, at four batch sizes</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    panels: tuple[tuple[str, Callable[[int, int], int]], ...] = (
        ("steps", lambda step, batch: step),
        ("sequences", lambda step, batch: step * batch),
    )
    for place, (name, of) in enumerate(panels):
        lines += _panel(found, LEFT + place * (PANEL + 70), name, of)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _panel(
    found: dict[str, Any], left: int, name: str, of: Callable[[int, int], int]
) -> Iterator[str]:
    curves = [
        (r["batch"], [(of(step, r["batch"]), loss) for step, loss in r["curve"]])
        for r in found["runs"]
    ]
    places = [x for _, curve in curves for x, loss in curve if loss <= HIGHEST]
    first, last = math.log10(min(places)), math.log10(max(places))

    def across(x: float) -> float:
        return left + PANEL * (math.log10(x) - first) / (last - first)

    def down(loss: float) -> float:
        return TOP + DEEP * (HIGHEST - loss) / (HIGHEST - LOWEST)

    yield (
        f'<text x="{left}" y="{TOP - 12}" font-weight="bold">held-out loss against '
        f"{escape(name)}</text>"
    )
    for tenths in range(round(LOWEST * 10), round(HIGHEST * 10) + 1, 4):
        y = down(tenths / 10)
        yield f'<path d="M{left} {y:.1f}h{PANEL}" stroke="#ddd"/>'
        yield f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{tenths / 10:.1f}</text>'
    for x in _marks(first, last):
        yield f'<text x="{across(x):.1f}" y="{TOP + DEEP + 18}" text-anchor="middle">{x:,}</text>'
    y = down(found["target"])
    yield f'<path d="M{left} {y:.1f}h{PANEL}" stroke="#c33" stroke-dasharray="4 3"/>'
    for place, (colour, (batch, curve)) in enumerate(zip(COLOURS, curves, strict=True)):
        shown = [(x, loss) for x, loss in curve if LOWEST <= loss <= HIGHEST]
        points = " ".join(f"{across(x):.1f},{down(loss):.1f}" for x, loss in shown)
        yield f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        x, y = left + PANEL - 70, TOP + 14 + 16 * place
        yield f'<path d="M{x} {y - 4}h18" stroke="{colour}" stroke-width="2"/>'
        yield f'<text x="{x + 24}" y="{y}">B = {batch}</text>'


def _marks(first: float, last: float) -> list[int]:
    """1, 3, 10, 30 and so on, between two powers of ten."""
    values = [digit * 10**power for power in range(7) for digit in (1, 3)]
    return [value for value in values if 10**first <= value <= 10**last]

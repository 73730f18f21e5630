"""Colours that colour-blind readers tell apart: Okabe and Ito's eight for kinds, cividis for many
of one kind."""

from __future__ import annotations

from bokeh.palettes import cividis

# jfly.uni-koeln.de/color: blue, orange, green, vermillion, sky, purple, yellow, grey.
CATEGORIES = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#56B4E9",
    "#CC79A7",
    "#F0E442",
    "#8A8F98",
)
BLUE, ORANGE, GREEN, VERMILLION, SKY, PURPLE, _, GREY = CATEGORIES

MEMORY_COLORS = {
    "parameters": BLUE,
    "gradients": SKY,
    "optimizer": GREEN,
    "activations": ORANGE,
    "workspace": PURPLE,
}
STEP_COLORS = {
    "compute": BLUE,
    "collectives inside layers": SKY,
    "messages between stages": ORANGE,
    "data-parallel collectives": PURPLE,
    "optimizer": GREEN,
    "outer step": VERMILLION,
    "idle": GREY,
}
BAR_COLORS = (SKY, BLUE, ORANGE, PURPLE, GREEN, VERMILLION)
"""Of timeline.KINDS."""
DARKEST = 48
VERDICTS = {"runs": BLUE, "tight": SKY, "does not fit": ORANGE, "ruled out": GREY}
CHOSEN = VERMILLION


def group_colors(count: int) -> tuple[str, ...]:
    """A colour a group: categories while there are enough of them; beyond DARKEST of cividis, so
    that all show on black. At most 256 - DARKEST: more groups share colours."""
    if count <= len(CATEGORIES):
        return CATEGORIES[:count]
    scale = cividis(256)[DARKEST:]
    shown = min(count, len(scale))
    return tuple(scale[round(i * (len(scale) - 1) / (shown - 1))] for i in range(shown))

"""The page in Chromium: no error, no request, on a phone and a desk, light and dark; hover, zoom
and switches work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.actions.action_builder import ActionBuilder
from selenium.webdriver.common.actions.mouse_button import MouseButton

from shardwright.report.report_files import write_report
from tests.conftest import SMALL_RECIPE
from tests.report.browser import Page, browser, needs_browser
from tests.report.folders import (
    LARGEST,
    compiled,
    small_mixture,
    two_islands,
    with_islands_run,
    with_run,
    with_validation,
)

pytestmark = [needs_browser, pytest.mark.browser]

CHARTS = (
    *("cluster", "memory", "timeline", "parts", "space", "loss", "seconds"),
    *("norm", "rate", "tokens"),
)
TILES = """
const tiles = [...document.querySelectorAll(".tiles div")]
for (const tile of tiles) if (arguments[0]) tile.querySelector("b").textContent = arguments[0]
return tiles.map(tile => {
  const text = document.createRange(), box = tile.getBoundingClientRect()
  text.selectNodeContents(tile.querySelector("b"))
  const inside = text.getBoundingClientRect()
  return [inside.left - box.left, box.right - inside.right]
})"""
"""Measures what each tile leaves on both sides of its figure, in pixels."""


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    ran = with_run(compiled(SMALL_RECIPE, folder), 60)
    write_report(with_validation(ran, (20, 40)), folder / "report.html", None)
    return folder / "report.html"


def place(page: Page, chart: str, x: float, y: float) -> tuple[int, int]:
    """Scroll to a point of a chart, given in its own values, and return its place in the window."""
    found = page.script(
        """
        const [chart, x, y] = arguments
        document.getElementById(`chart-${chart}`).scrollIntoView({block: "center"})
        const view = Bokeh.index.find_one(plots[chart])
        const box = view.canvas_view.el.getBoundingClientRect()
        const {x_scale, y_scale} = view.frame
        return [box.left + x_scale.compute(x), box.top + y_scale.compute(y)]
        """,
        chart,
        x,
        y,
    )
    return round(found[0]), round(found[1])


def tooltip(page: Page) -> str:
    text: str = page.script(
        """
        const texts = []
        const look = node => {
          if (node.nodeType == 1 && node.classList.contains("bk-Tooltip")
              && getComputedStyle(node).display != "none")
            texts.push((node.shadowRoot ?? node).textContent)
          for (const child of [...(node.shadowRoot?.children ?? []), ...node.children]) look(child)
        }
        look(document.body)
        return texts.join(" ")
        """
    )
    return " ".join(text.split())


def move(page: Page, at: tuple[int, int]) -> None:
    mouse = ActionBuilder(page.driver)
    mouse.pointer_action.move_to_location(at[0] - 3, at[1])
    mouse.pointer_action.move_to_location(*at)
    mouse.perform()
    page.settle()


@pytest.mark.parametrize("width", [360, 1440])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_renders_without_error_or_request(
    page_file: Path, tmp_path: Path, width: int, dark: bool
) -> None:
    with browser(width, dark=dark) as driver:
        page = Page(driver, page_file)
        assert page.console() == []
        assert page.requests() == []
        assert page.script("return document.documentElement.scrollWidth") <= width
        for chart in CHARTS:
            size = page.script(
                f"const b = document.querySelector('#chart-{chart} > *').getBoundingClientRect(); "
                "return [b.left, b.right, b.height]"
            )
            assert size[0] >= 0 and size[1] <= width and size[2] > 80, (chart, size)
        paper = page.script(
            "return getComputedStyle(document.querySelector('#memory')).backgroundColor"
        )
        assert (paper == "rgb(255, 255, 255)") == (not dark)
        text = page.script("return plots.memory.below[0].major_label_text_color")
        assert text == ("#a2acb9" if dark else "#5b6573")
        page.script("document.getElementById('theme').click()")
        after = page.script(
            "return getComputedStyle(document.querySelector('#memory')).backgroundColor"
        )
        assert after != paper
        assert page.script("return plots.memory.below[0].major_label_text_color") == (
            "#5b6573" if dark else "#a2acb9"
        )
        assert page.screenshot(tmp_path / "page.png").stat().st_size > 50_000


@pytest.mark.parametrize("width", [360, 700, 1024, 1280, 1440])
def test_a_figure_stays_in_its_tile(page_file: Path, width: int) -> None:
    with browser(width) as driver:
        page = Page(driver, page_file)
        for figure in ("", "38.4 seconds", "123,456,789,012 GPU-hours"):
            found = page.script(TILES, figure)
            assert len(found) >= 6
            assert all(left >= 8 and right >= 8 for left, right in found), (figure, found)
        assert page.script("return document.documentElement.scrollWidth") <= width


def test_the_map_of_a_mixture_shows_its_experts(tmp_path: Path) -> None:
    folder = compiled(small_mixture(), tmp_path)
    write_report(folder, tmp_path / "report.html", None)
    with browser(1440) as driver:
        page = Page(driver, tmp_path / "report.html")
        move(page, place(page, "cluster", 1, 0))
        told = tooltip(page)
        assert "expert 1" in told and "experts 2 to 3" in told, told
        page.script("document.querySelector('[data-axis=expert]').click()")
        cells = "plots.cluster.renderers.find(r => r.name == 'cells')"
        assert page.script(f"return {cells}.glyph.fill_color.field") == "expert"
        ActionChains(driver).click().perform()
        page.settle()
        # Its other expert rank, and its neighbour in the pipeline.
        selected = page.script(f"return {cells}.data_source.selected.indices")
        assert sorted(selected) == [0, 1, 3]
        assert page.console() == []


def test_hover_zoom_switches_and_peers(page_file: Path) -> None:
    with browser(1440) as driver:
        page = Page(driver, page_file)
        move(page, place(page, "cluster", 1, 0))
        told = tooltip(page)
        assert (
            "rank 1" in told and "node 0, slot 1" in told and "pipeline 0, tensor 1, data 0" in told
        ), told
        assert "embedding … model.layers.1" in told and "GiB" in told, told
        page.script("document.querySelector('[data-axis=tensor]').click()")
        field = "return plots.cluster.renderers.find(r => r.name == 'cells').glyph.fill_color.field"
        assert page.script(field) == "tensor"
        ActionChains(driver).click().perform()  # where the pointer is: rank 1 of 2 x 2
        page.settle()
        selected = page.script(
            "return plots.cluster.renderers.find(r => r.name == "
            "'cells').data_source.selected.indices"
        )
        assert sorted(selected) == [0, 1, 3]  # its tensor and its pipeline neighbour

        middle = page.script(
            "const d = plots.timeline.renderers.find(r => r.name == 'forward').data_source.data; "
            "return [(d.left[0] + d.right[0]) / 2, (d.bottom[0] + d.top[0]) / 2]"
        )
        move(page, place(page, "timeline", *middle))
        assert "forward" in tooltip(page) and "micro-batch 0" in tooltip(page)
        before = page.script("return [plots.timeline.x_range.start, plots.timeline.x_range.end]")
        half = (before[0] + before[1]) / 2
        mouse = ActionBuilder(driver)
        mouse.pointer_action.move_to_location(*place(page, "timeline", half * 0.5, 0))
        mouse.pointer_action.pointer_down(MouseButton.LEFT)
        mouse.pointer_action.move_to_location(*place(page, "timeline", half, 0.2))
        mouse.pointer_action.pointer_up(MouseButton.LEFT)
        mouse.perform()
        page.settle()
        after = page.script("return [plots.timeline.x_range.start, plots.timeline.x_range.end]")
        assert after[0] == pytest.approx(half * 0.5, rel=0.05) and after[1] == pytest.approx(
            half, rel=0.05
        )

        chosen = page.script(
            "const d = plots.space.renderers.find(r => r.name == 'chosen').data_source.data; "
            "return [d.gib[0], d.seconds[0]]"
        )
        move(page, place(page, "space", *chosen))
        assert "tensor=2 pipeline=2" in tooltip(page) and "chosen" in tooltip(page)
        page.script(
            "document.querySelector('[data-chart=space][data-series=\"ruled out\"]').click()"
        )
        shown = (
            "return plots.space.renderers.filter(r => r.name == 'ruled out').map(r => r.visible)"
        )
        assert page.script(shown) == [False]
        assert page.console() == []


def test_the_validation_curve_stands_beside_the_training_loss(page_file: Path) -> None:
    with browser(1440) as driver:
        page = Page(driver, page_file)
        drawn = page.script(
            "return plots.loss.renderers.filter(r => r.name == 'validation')"
            ".map(r => [Array.from(r.data_source.data.step), Array.from(r.data_source.data.loss)])"
        )
        assert drawn == [[[20, 40], [2.5, 2.0]]] * 2  # the line and its points
        move(page, place(page, "loss", 40, 2.0))
        assert "validation 2.0000" in tooltip(page) and "perplexity 7.39" in tooltip(page), tooltip(
            page
        )
        shown = "return plots.loss.renderers.map(r => [r.name, r.visible])"
        page.script("document.querySelector('[data-chart=loss][data-series=validation]').click()")
        assert page.script(shown) == [
            ["training", True],
            ["validation", False],
            ["validation", False],
        ]
        assert page.console() == []


def test_islands_are_drawn_and_switched(tmp_path: Path) -> None:
    folder = with_islands_run(compiled(two_islands(SMALL_RECIPE), tmp_path))
    write_report(folder, tmp_path / "report.html", None)
    for width in (360, 1440):
        with browser(width) as driver:
            page = Page(driver, tmp_path / "report.html")
            assert page.console() == [] and page.requests() == []
            assert page.script("return document.documentElement.scrollWidth") <= width
            for chart in ("cluster", "islands-loss", "islands-waits"):
                box = f"document.querySelector('#chart-{chart} > *').getBoundingClientRect()"
                assert page.script(f"return {box}.right <= {width} && {box}.height > 80"), chart
            if width < 1000:
                continue
            move(page, place(page, "islands-loss", 55, 4))
            assert "step 55" in tooltip(page) and "islands 0" in tooltip(page)
            labels = page.script(
                "return [...document.querySelectorAll('[data-chart=islands-loss]')].map(b => "
                "b.textContent)"
            )
            assert labels == ["island 0", "island 1", "all islands"]
            move(page, place(page, "cluster", 0, 0))
            assert "island 0, node 0, slot 0" in tooltip(page)
            # A tap shows the group inside the island, and the same shard of the other one.
            at = place(page, "cluster", 0, 0)
            mouse = ActionBuilder(page.driver)
            mouse.pointer_action.move_to_location(*at).click()
            mouse.perform()
            page.settle()
            found = page.script(
                "const s = plots.cluster.renderers.find(r => r.name == 'cells').data_source; "
                "return s.selected.indices.map(i => [s.data.island[i], s.data.rank[i]])"
            )
            assert [0, 0] in found and [each for each in found if each[0] == 1] == [[1, 0]]


def test_it_prints_whole_and_light(page_file: Path) -> None:
    with browser(1440, dark=True) as driver:
        page = Page(driver, page_file)
        picture = "Bokeh.index.find_one(plots.memory).canvas_view.primary.canvas.toDataURL()"
        # In one turn of the event loop: paper does not wait for the next frame.
        assert page.script(
            f"const dark = {picture}; dispatchEvent(new Event('beforeprint')); return dark != "
            f"{picture}"
        )
        assert page.script("return document.documentElement.classList.contains('dark')") is False
        printed: dict[str, Any] = driver.execute_cdp_cmd(
            "Page.printToPDF", {"printBackground": True}
        )
        assert len(printed["data"]) > 50_000


@pytest.mark.prove
def test_the_largest_plan_opens_at_once(tmp_path: Path) -> None:
    folder = compiled(LARGEST, tmp_path)
    [(path, size)] = write_report(folder, tmp_path / "large.html", None)
    assert size < 6_000_000
    with browser(1440) as driver:
        page = Page(driver, path)
        cells = page.script(
            "return plots.cluster.renderers.find(r => r.name == "
            "'cells').data_source.data.rank.length"
        )
        assert cells == 16_384
        move(page, place(page, "cluster", 0, 0))
        assert "rank 0" in tooltip(page)
        assert page.console() == []
    # Processor time: the tests share their cores. On an idle machine the wall clock says the same.
    assert page.busy_seconds < 3, (page.busy_seconds, page.opened_seconds)

"""A page in Debian's Chromium, headless: what it asks the network for, what it logs, and what its
charts hold."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

MISSING = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
needs_browser = pytest.mark.skipif(
    bool(MISSING),
    reason=(
        "NO BROWSER: the report is NOT tested: apt-get install chromium chromium-driver "
        f"({', '.join(MISSING)})"
    ),
)


class Page:
    """One page that was opened; opened_seconds: until every chart stood. busy_seconds: processor
    time of the page's main thread until then, which other programs do not lengthen."""

    def __init__(self, driver: webdriver.Chrome, path: Path) -> None:
        self.driver = driver
        driver.execute_cdp_cmd("Performance.disable", {})
        driver.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
        began = time.perf_counter()
        driver.get(path.as_uri())
        self.wait("return document.documentElement.dataset.ready == 'true'")
        self.opened_seconds = time.perf_counter() - began
        metrics = driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
        self.busy_seconds = next(m["value"] for m in metrics if m["name"] == "TaskDuration")

    def script(self, text: str, *arguments: object) -> Any:
        return self.driver.execute_script(text, *arguments)

    def wait(self, condition: str, seconds: float = 20) -> None:
        deadline = time.monotonic() + seconds
        while not self.script(condition):
            if time.monotonic() > deadline:
                raise AssertionError(f"never true: {condition}; the console says {self.console()}")
            time.sleep(0.02)

    def console(self) -> list[str]:
        return [
            e["message"]
            for e in self.driver.get_log("browser")
            if e["level"] in ("SEVERE", "WARNING")
        ]

    def requests(self) -> list[str]:
        """Every address that the page asked for, but the file itself and data in the page."""
        events = (json.loads(e["message"])["message"] for e in self.driver.get_log("performance"))
        asked = [
            e["params"]["request"]["url"]
            for e in events
            if e["method"] == "Network.requestWillBeSent"
        ]
        return [
            url
            for url in asked
            if not url.startswith(("data:", "blob:")) and not url.endswith(".html")
        ]

    def settle(self) -> None:
        """Two frames later everything that was asked for is drawn."""
        self.driver.execute_async_script(
            "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => "
            "setTimeout(done, 150)))"
        )

    def screenshot(self, path: Path) -> Path:
        """The whole page."""
        self.settle()
        size = self.driver.execute_cdp_cmd("Page.getLayoutMetrics", {})["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.driver.execute_cdp_cmd(
            "Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip}
        )
        import base64

        path.write_bytes(base64.b64decode(shot["data"]))
        return path


@contextlib.contextmanager
def browser(width: int, *, dark: bool = False, height: int = 1000) -> Iterator[webdriver.Chrome]:
    options = Options()
    options.binary_location = shutil.which("chromium") or ""
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        # The window cannot be as narrow as a phone; the view that it emulates can.
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        yield driver
    finally:
        driver.quit()

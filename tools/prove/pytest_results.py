"""pytest's side of `make prove`: --prove-piece NAME --prove-run FOLDER leaves out what has passed,
and keeps what the tests find."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tools.prove.proof_results import PieceResult

RESULT = pytest.StashKey[PieceResult]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--prove-piece", help="a piece of tools/prove/proof_pieces.py")
    parser.addoption("--prove-run", help="the folder that keeps the results")


def pytest_configure(config: pytest.Config) -> None:
    if piece := config.getoption("--prove-piece"):
        config.stash[RESULT] = PieceResult(piece, Path(config.getoption("--prove-run")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (result := config.stash.get(RESULT, None)) is None:
        return
    passed = result.passed()
    left_out = [item for item in items if item.nodeid in passed]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.nodeid not in passed]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome = yield
    report: pytest.TestReport = outcome.get_result()  # type: ignore[attr-defined]
    result = item.config.stash.get(RESULT, None)
    if result is not None and (report.when == "call" or report.outcome != "passed"):
        result.finished(item.nodeid, report.outcome, report.duration)


@pytest.fixture
def proved(request: pytest.FixtureRequest) -> Callable[[str, str, dict[str, Any]], None]:
    """record(area, case, figures): what a test of `make prove` measured. Outside of a piece (pytest
    -m prove by hand) nothing is kept."""
    result = request.config.stash.get(RESULT, None)

    def record(area: str, case: str, figures: dict[str, Any]) -> None:
        if result is not None:
            result.finding(request.node.nodeid, area, case, figures)

    return record

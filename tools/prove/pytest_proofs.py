"""pytest's side of `make prove`: --prove-piece NAME leaves out what has passed, and keeps what the
tests find."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tools.prove.proof_ledger import Ledger

LEDGER = pytest.StashKey[Ledger]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--prove-piece", help="a piece of tools/prove/proof_pieces.py whose results are kept"
    )


def pytest_configure(config: pytest.Config) -> None:
    if piece := config.getoption("--prove-piece"):
        config.stash[LEDGER] = Ledger(piece)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (ledger := config.stash.get(LEDGER, None)) is None:
        return
    passed = ledger.passed()
    left_out = [item for item in items if item.nodeid in passed]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.nodeid not in passed]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome = yield
    report: pytest.TestReport = outcome.get_result()  # type: ignore[attr-defined]
    ledger = item.config.stash.get(LEDGER, None)
    if ledger is not None and (report.when == "call" or report.outcome != "passed"):
        ledger.finished(item.nodeid, report.outcome, report.duration)


@pytest.fixture
def proved(request: pytest.FixtureRequest) -> Callable[[str, str, dict[str, Any]], None]:
    """record(area, case, figures): what a test of `make prove` measured, for benchmarks/AREA.json.
    Outside of a piece (pytest -m prove by hand) nothing is kept."""
    ledger = request.config.stash.get(LEDGER, None)

    def record(area: str, case: str, figures: dict[str, Any]) -> None:
        if ledger is not None:
            ledger.figure(request.node.nodeid, area, case, figures)

    return record

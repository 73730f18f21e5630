"""pytest's plugin for a Python without torch (`make test-light`): a test that comes to import it is
skipped."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Generator, Iterable
from importlib.abc import MetaPathFinder
from importlib.metadata import DistributionFinder

import pytest

PACKAGES = {
    *("torch", "transformers", "tokenizers", "deepspeed", "megatron", "megatron-core", "peft"),
    *("PIL", "pyarrow", "zstandard", "sentencepiece", "selenium", "kubernetes_validate"),
}


class SkippingFinder(MetaPathFinder):
    """Skips the running test, or the test file that is read, at an import of PACKAGES or a question
    for their version.

    What pytest.skip raises is no Exception: no `except` of the code under test takes it for an
    error of its own.
    """

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if path is None:
            _skip(name)

    def find_distributions(self, context: DistributionFinder.Context) -> Iterable[object]:
        _skip(context.name)
        return ()


def _skip(name: str | None) -> None:
    if name in PACKAGES:
        pytest.skip(f"{name} is not installed", allow_module_level=True)


def pytest_configure() -> None:
    if importlib.util.find_spec("torch") is None:
        sys.meta_path.append(SkippingFinder())


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Forgets a skipped test file, which pytest leaves in sys.modules half executed: another one
    that imports it is skipped then, instead of missing names in it."""
    report = yield
    if report.skipped and isinstance(collector, pytest.Module):
        parts = collector.path.relative_to(collector.config.rootpath).with_suffix("").parts
        sys.modules.pop(".".join(parts), None)
    return report

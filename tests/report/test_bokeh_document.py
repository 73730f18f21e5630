"""What draws the charts without the package bokeh writes what bokeh itself reads, and would
write."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwright.report import bokeh_document
from shardwright.report.report_files import write_report
from tests.conftest import SMALL_RECIPE
from tests.report.folders import (
    compiled,
    two_islands,
    with_islands_run,
    with_run,
    with_validation,
)
from tests.report.test_report import PlanNumbers

bokeh = pytest.importorskip("bokeh", reason="the charts are compared with bokeh's own")


def charts(folder: Path) -> dict[str, Any]:
    page = folder / "report.html"
    write_report(folder, page, None)
    found: dict[str, Any] = PlanNumbers(page.read_text("utf-8")).scripts["items"]
    return found


def models(document: Any) -> dict[str, Any]:
    """Id -> the model that a document defines."""
    found: dict[str, Any] = {}

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            if value.get("type") == "object":
                found[value["id"]] = value
            for inner in value.values():
                walk(inner)
        elif isinstance(value, list):
            for inner in value:
                walk(inner)

    walk(document)
    return found


def differences(bokehs: Any, ours: Any) -> Iterator[str]:
    """Yield what of bokeh's document ours lacks, or has another value of."""
    theirs, mine = models(bokehs), models(ours)
    assert theirs.keys() == mine.keys()
    for key, model in theirs.items():
        assert model["name"] == mine[key]["name"]
        given = mine[key].get("attributes", {})
        for name, value in model.get("attributes", {}).items():
            if name not in given or plain(value) != plain(given[name]):
                yield f"{model['name']}.{name}: {plain(value)!r}, ours {plain(given.get(name))!r}"


def plain(value: Any) -> Any:
    """A value with its models named by their ids alone, and its arrays unpacked."""
    if isinstance(value, dict):
        if "id" in value:
            return {"id": value["id"]}
        if value.get("type") == "ndarray":
            return value["dtype"], gzip.decompress(base64.b64decode(value["array"]["data"]))
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list) else value


def test_bokeh_reads_every_chart_and_would_write_no_attribute_more(tmp_path: Path) -> None:
    from bokeh.document import Document

    run = with_validation(with_run(compiled(SMALL_RECIPE, tmp_path / "run"), 60), (10, 20, 60))
    islands = with_islands_run(compiled(two_islands(SMALL_RECIPE), tmp_path / "islands"))
    for folder, names in ((run, {"loss", "seconds"}), (islands, {"islands-loss"})):
        drawn = charts(folder)
        assert {"cluster", "memory", "timeline", "parts", "space"} | names <= drawn.keys()
        for name, item in drawn.items():
            assert item["version"] == bokeh.__version__
            # bokeh checks every type and value, and writes what differs from BokehJS's defaults.
            document = Document.from_json(item["doc"]).to_json(deferred=False)
            written = json.loads(json.dumps(document))
            found = list(differences(written["roots"], item["doc"]["roots"]))
            assert not found, f"{name}: {found[:3]}"


def test_bokehjs_is_the_installed_bokehs_and_names_its_licence() -> None:
    from tools.generate.bokeh_script import PATH, packed_script

    assert bokeh.__version__ == bokeh_document.VERSION
    assert gzip.decompress(PATH.read_bytes()) == gzip.decompress(packed_script()), "make generated"
    script = bokeh_document.script()
    assert "Copyright (c) Anaconda, Inc., and Bokeh Contributors" in script[:200]


def test_the_same_chart_is_the_same_text(tmp_path: Path) -> None:
    folder = compiled(SMALL_RECIPE, tmp_path)
    assert charts(folder) == charts(folder)

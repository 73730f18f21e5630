"""Write the report's files atomically."""

from __future__ import annotations

import json
from pathlib import Path

from shardwright.compile.compiled_folder import read_folder
from shardwright.diagnostics import Refusal, refusal
from shardwright.report.step_timeline import chrome_trace
from shardwright.utils.file_io import write_atomically


def write_report(folder: Path, output: Path, trace: Path | None) -> list[tuple[Path, int]]:
    """Write the report and return its files with their bytes.

    Raises Refusal with read_folder's codes, or SW3323 where a file cannot be written.
    """
    subject = read_folder(folder)
    for path in (output, trace):
        if path is not None and path.is_dir():
            raise _unwritable(path, "it is a folder")
    from shardwright.report.report_page import render_page  # numpy and Jinja: after the checks

    page, timeline = render_page(subject)
    texts = [(output, page)]
    if trace is not None:
        document = chrome_trace(
            timeline, subject.plan.name, subject.plan.predicted.time.step_seconds
        )
        texts.append((trace, json.dumps(document, separators=(",", ":")) + "\n"))
    for path, text in texts:
        try:
            write_atomically(path, text)
        except OSError as error:
            raise _unwritable(path, str(error.strerror or error)) from None
    return [(path, len(text.encode("utf-8"))) for path, text in texts]


def _unwritable(path: Path, why: str) -> Refusal:
    help = "Name a file in a folder that exists and that you may write to."
    return refusal("SW3323", f"{str(path)!r} cannot be written: {why}", help)

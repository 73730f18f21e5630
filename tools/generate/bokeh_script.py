"""Copies BokehJS, which draws the report's charts, from the installed bokeh into the package."""

from __future__ import annotations

import gzip
from pathlib import Path

import bokeh

from shardwright.report import bokeh_document

PATH = Path(bokeh_document.__file__).with_name(bokeh_document.SCRIPT)


def packed_script() -> bytes:
    """Return bokeh.min.js with its licence, compressed; the same script gives the same bytes."""
    script = Path(bokeh.__file__).with_name("server") / "static/js/bokeh.min.js"
    return gzip.compress(script.read_bytes(), mtime=0)


def main() -> None:
    content = packed_script()
    changed = not PATH.exists() or PATH.read_bytes() != content
    PATH.write_bytes(content)
    print(f"{PATH}: {len(content):,} bytes, {'changed' if changed else 'as before'}")
    if bokeh.__version__ != bokeh_document.VERSION:
        raise SystemExit(f"{bokeh_document.__file__}: VERSION is not {bokeh.__version__}")


if __name__ == "__main__":
    main()

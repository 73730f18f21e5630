"""Traced graphs on disk, so that the next process needs no torch. Nothing here can fail: a file
that cannot be read, written or understood is a graph that is traced anew."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import hashlib
import json
import os
import uuid
import zlib
from contextlib import suppress
from pathlib import Path

import shardwright
from shardwright.models.model_graph import ModelGraph
from shardwright.utils.bounded_read import parse_json
from shardwright.utils.json_records import read_record
from shardwright.utils.optional_packages import installed_version

VARIABLE = "SHARDWRIGHT_CACHE"
"""The folder; or "off": every graph is traced, the shipped ones too."""
GRAPH_VERSION = 1
"""Raised where a graph changes its meaning and no source file of ours does (the form of the files,
say)."""

# What a graph's content depends on: the tracing, and the fields that it fills.
PACKAGE = Path(__file__).parent.parent
_TRACING = ("models", "recipe", "utils")
# All that a damaged, foreign or vanished file can raise; ValueError is UTF-8's too.
UNREADABLE = (OSError, EOFError, ValueError, zlib.error)


def graph_cache_is_off() -> bool:
    return os.environ.get(VARIABLE) == "off"


def cache_folder() -> Path | None:
    """$SHARDWRIGHT_CACHE, else $XDG_CACHE_HOME/shardwright, else ~/.cache/shardwright; None without
    any home."""
    if own := os.environ.get(VARIABLE):
        return Path(own)
    if os.path.isabs(
        base := os.environ.get("XDG_CACHE_HOME", "")
    ):  # the XDG rules: a relative one is ignored
        return Path(base, "shardwright")
    home = os.path.expanduser("~")
    return Path(home, ".cache/shardwright") if os.path.isabs(home) else None


def cache_key(config_text: str, attention: str, inline: bool) -> str:
    """sha256 (hex) of all that the graph depends on, the code that traces it included."""
    versions = {name: installed_version(name) for name in ("torch", "transformers")}
    parts = [
        GRAPH_VERSION,
        shardwright.__version__,
        versions,
        tracing_source_hash(PACKAGE),
        config_text,
        attention,
        inline,
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@functools.cache
def tracing_source_hash(package: Path) -> str:
    """sha256 (hex) of the source files that trace and of the tables that they read: an edit is a
    new key."""
    digest = hashlib.sha256()
    sources = [path for folder in _TRACING for path in (package / folder).rglob("*.py")]
    for path in sorted([*sources, *(package / "models").glob("tensor_*.json")]):
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def cached_graph(key: str) -> ModelGraph | None:
    path = _path(key)
    if path is None:
        return None
    try:
        return graph_from_json(gzip.decompress(path.read_bytes()))
    except UNREADABLE:
        return None


def store_graph(key: str, graph: ModelGraph) -> None:
    """Written beside its place and renamed into it: readers see a whole file, and of two writers
    the last one wins."""
    path = _path(key)
    if path is None:
        return
    # mtime: the same graph is the same bytes. A decoder layer much like the one before it costs
    # next to nothing.
    content = gzip.compress(graph_to_json(graph).encode(), mtime=0)
    unfinished = path.with_name(f".{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_bytes(content)
        unfinished.replace(path)
    except OSError:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)


def graph_to_json(graph: ModelGraph) -> str:
    return json.dumps(dataclasses.asdict(graph), separators=(",", ":"))


def graph_from_json(text: str | bytes) -> ModelGraph:
    """Raises ValueError where the text is no graph."""
    graph = read_record(ModelGraph, parse_json(text))
    graph.verify()
    return graph


def _path(key: str) -> Path | None:
    folder = cache_folder()
    return None if folder is None else folder / "graphs" / f"{key}.json.gz"

"""Build the ModelGraph of the recipe's `model` section: memoized, cached, from the catalog or
traced.

Only tracing a new graph (graph_trace.py) imports torch.
"""

from __future__ import annotations

import dataclasses
import functools
import gzip
import hashlib
import json
import os
import uuid
import zipfile
import zlib
from contextlib import suppress
from importlib import resources
from pathlib import Path

import shardwright
from shardwright.diagnostics import Diagnostic, Refusal
from shardwright.models.model_graph import ModelGraph
from shardwright.models.model_sources import local_processor, read_config
from shardwright.models.weights_check import (
    check_weights,
    find_untied_heads,
    tied_head_error,
    with_untied_head,
)
from shardwright.recipe.recipe_types import ModelSection
from shardwright.utils.file_io import parse_json
from shardwright.utils.installation import installed_version, missing_modules
from shardwright.utils.json_values import JsonObject, read_record
from shardwright.utils.private_names import private_name_errors

# The cache of traced graphs on disk. A file that cannot be read or written means tracing again.


VARIABLE = "SHARDWRIGHT_CACHE"
"""The cache folder, or "off": every graph is traced, those of the catalog too."""
GRAPH_VERSION = 1
"""Raised where a graph changes although no hashed source file does (the file format, for
example)."""

TRACING = "tracing a model whose graph does not come with shardwright"
# Packages whose sources decide a graph's content.
PACKAGE = Path(__file__).parent.parent
_TRACING = ("models", "recipe", "utils")
# What reading a damaged or vanished file can raise; ValueError covers invalid UTF-8.
UNREADABLE = (OSError, EOFError, ValueError, zlib.error)


def graph_cache_is_off() -> bool:
    return os.environ.get(VARIABLE) == "off"


def cache_folder() -> Path | None:
    """Return $SHARDWRIGHT_CACHE, else $XDG_CACHE_HOME/shardwright, else ~/.cache/shardwright; None
    where the cache is off, and without a home."""
    if graph_cache_is_off():
        return None
    if own := os.environ.get(VARIABLE):
        return Path(own)
    # The XDG specification ignores a relative path.
    if os.path.isabs(base := os.environ.get("XDG_CACHE_HOME", "")):
        return Path(base, "shardwright")
    home = os.path.expanduser("~")
    return Path(home, ".cache/shardwright") if os.path.isabs(home) else None


def cache_key(config_text: str, attention: str, inline: bool) -> str:
    """Return the sha256 (hex) of everything that the graph depends on, the tracing code
    included."""
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
    """Return the sha256 (hex) of the tracing sources and their tables: an edit makes a new key."""
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
    """Store a graph by renaming a temporary file, so that readers never see a partial one."""
    path = _path(key)
    if path is None:
        return
    # mtime=0: equal graphs give equal bytes.
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
    """Read a graph. Raises ValueError where the text is not one."""
    graph = read_record(ModelGraph, parse_json(text))
    graph.verify()
    return graph


def _path(key: str) -> Path | None:
    folder = cache_folder()
    return None if folder is None else folder / "graphs" / f"{key}.json.gz"


# The traced graphs of the catalog and of the shipped recipes: graphs.zip, one member for each
# distinct configuration, written by `make generated`; used only with the torch and transformers
# versions that traced them.


ARCHIVE = "graphs.zip"
ATTENTION = "auto"
"""The attention that the catalog's graphs were traced with."""
VERSIONS = "versions.json"


def catalog_graph(config_text: str, attention: str, inline: bool = False) -> ModelGraph | None:
    """Return the shipped graph of this configuration (JSON with sorted keys).

    None where no graph of it is shipped, or the graphs were traced with other versions.
    inline: the configuration is in the recipe, where it is checked more strictly.
    """
    if attention != ATTENTION:
        return None
    try:
        with (
            resources.files(__package__).joinpath(ARCHIVE).open("rb") as file,
            zipfile.ZipFile(file) as archive,
        ):
            recorded = json.loads(archive.read(VERSIONS))
            # A package that is not installed cannot disagree, and could not trace either.
            if any(
                version not in (None, recorded.get(name)) for name, version in versions().items()
            ):
                return None
            return graph_from_json(archive.read(member(config_text, inline)))
    except (KeyError, zipfile.BadZipFile, *UNREADABLE):  # KeyError: no such member
        return None


def versions() -> dict[str, str | None]:
    """Return the versions that a trace depends on, None where not installed.

    transformers decides modules and defaults in any release; torch changes how they compute with
    minor releases.
    """
    torch = installed_version("torch")
    return {
        "torch": torch and ".".join(torch.split(".")[:2]),
        "transformers": installed_version("transformers"),
    }


def member(config_text: str, inline: bool = False) -> str:
    text = f"inline {config_text}" if inline else config_text
    return hashlib.sha256(text.encode()).hexdigest()[:32]


_KNOWN: dict[tuple[str, str, str, bool, str], ModelGraph] = {}
"""Memoized graphs: `estimate` needs the same graph many times."""


def build_model_graph(section: ModelSection) -> ModelGraph:
    """Build the model's graph, with a head of its own where the weights have one (SW2026).

    Raises Refusal (SW2xxx) where the model cannot be found, read, built or split.
    """
    config, inline = read_config(section)
    graph = _graph(section, config, inline)
    heads = _own_heads(section, graph)
    if not heads:
        return graph
    separate = _graph(section, with_untied_head(config), inline)
    if _own_heads(section, separate) or len(separate.tied) + 1 != len(graph.tied):
        raise tied_head_error([name for pair in heads for name in pair])
    return separate


def compare_weights(section: ModelSection, graph: ModelGraph) -> tuple[Diagnostic, ...]:
    """Return warnings and notes about weights that do not match the model exactly.

    Raises Refusal: SW1913, SW2022, SW2024 to SW2027.
    """
    config, inline = read_config(section)
    heads = _own_heads(section, _graph(section, config, inline))
    return check_weights(Path(section.source or ""), config, graph, heads)


def _own_heads(section: ModelSection, graph: ModelGraph) -> tuple[tuple[str, str], ...]:
    source = section.source or ""
    if section.weights != "pretrained" or not graph.tied or not Path(source).is_absolute():
        return ()
    return find_untied_heads(Path(source), graph.tied)


def _graph(section: ModelSection, config: JsonObject, inline: bool) -> ModelGraph:
    if section.trust_remote_code is not None and "auto_map" in config:
        return _trace(section, config, inline)  # its code is not part of any key
    text = json.dumps(config, sort_keys=True)
    processor = None if inline else local_processor(section)
    known = (
        text,
        section.attention,
        section.task,
        inline,
        "" if processor is None else processor[1],
    )
    if known not in _KNOWN:
        graph = _find(section, config, text, inline)
        patches = 0 if graph.vision is None else graph.vision.patches
        if processor is not None and patches and graph.task_traits.images_in_text:
            # Set the number of tiles that the model's own processor makes of an image.
            folder, settings = processor
            hashed = f"{graph.config_hash} {graph.task} {settings}"
            key = cache_key(hashed, graph.attention, inline=False)
            tiled = cached_graph(key)
            if tiled is None:
                from shardwright.models.image_processor import with_processor_tiles

                tiled = with_processor_tiles(graph, folder)
                store_graph(key, tiled)
            graph = tiled
        _KNOWN[known] = graph
    return _KNOWN[known]


def _find(section: ModelSection, config: JsonObject, text: str, inline: bool) -> ModelGraph:
    if graph_cache_is_off():
        return _trace(section, config, inline)
    graph = catalog_graph(text, section.attention, inline)
    if graph is not None and section.task in ("auto", graph.task):
        return graph
    # A model that several tasks can train has one graph for each.
    text = text if section.task == "auto" else f"{section.task} {text}"
    if graph is not None and (graph := catalog_graph(text, section.attention, inline)) is not None:
        return graph
    key = cache_key(text, section.attention, inline)
    graph = cached_graph(key)
    if graph is None:
        graph = _trace(section, config, inline)
        store_graph(key, graph)
    return graph


def _trace(section: ModelSection, config: JsonObject, inline: bool) -> ModelGraph:
    if absent := missing_modules(TRACING, "torch", "transformers"):
        raise absent
    if errors := private_name_errors("every model"):
        raise Refusal(*errors)
    from shardwright.models.graph_trace import trace_model_graph
    from shardwright.models.remote_code import load_remote_code

    return trace_model_graph(
        config if inline else load_remote_code(section, config),
        section.attention,
        inline,
        section.task,
    )

"""Stage 2: the recipe's `model` section -> ModelGraph. A graph that is known already comes without
torch: only graph.py, which traces a new one, imports it.
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
from shardwright.diagnostics import Diagnostic
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
from shardwright.utils.installation import installed_version
from shardwright.utils.json_records import read_record
from shardwright.utils.json_values import JsonObject

# Traced graphs on disk, so that the next process needs no torch. Nothing here can fail: a file
# that cannot be read, written or understood is a graph that is traced anew.


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


# The traced graphs of the shipped configurations: graphs.zip, one member a distinct configuration,
# written by `make generated`. A member is read alone, and only where transformers and torch are
# those that it was traced with.


ARCHIVE = "graphs.zip"
ATTENTION = "auto"
"""The attention that the shipped graphs were traced with; a pinned one is traced."""
VERSIONS = "versions.json"


def catalog_graph(config_text: str, attention: str) -> ModelGraph | None:
    """The graph of exactly this configuration (JSON with sorted keys); None where it is not
    shipped, or not for the installed versions."""
    if attention != ATTENTION:
        return None
    try:
        with (
            resources.files(__package__).joinpath(ARCHIVE).open("rb") as file,
            zipfile.ZipFile(file) as archive,
        ):
            recorded = json.loads(archive.read(VERSIONS))
            # What is not installed cannot disagree, and could not trace either.
            if any(
                version not in (None, recorded.get(name)) for name, version in versions().items()
            ):
                return None
            return graph_from_json(archive.read(member(config_text)))
    except (KeyError, zipfile.BadZipFile, *UNREADABLE):  # KeyError: no such member
        return None


def versions() -> dict[str, str | None]:
    """What a trace depends on outside this package. transformers decides the modules and the
    defaults, in any release; torch only how they compute, which changes with its minor releases.
    None where one is not installed."""
    torch = installed_version("torch")
    return {
        "torch": torch and ".".join(torch.split(".")[:2]),
        "transformers": installed_version("transformers"),
    }


def member(config_text: str) -> str:
    return hashlib.sha256(config_text.encode()).hexdigest()[:32]


_KNOWN: dict[tuple[str, str, str, bool, str], ModelGraph] = {}
"""Of this process: `estimate` asks for the same graph many times."""


def build_model_graph(section: ModelSection) -> ModelGraph:
    """With a head of its own where the weights have one, whatever the configuration says (SW2026).
    Raises Refusal with SW2xxx where the model cannot be found, read, built or split."""
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
    """What the weights in the folder `section.source` have that the model does not take, and what
    of them is read in another way than the configuration says. Raises Refusal: SW1913, SW2022,
    SW2024 to SW2027."""
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
        return _trace(section, config, inline)  # its code is no part of any key
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
        cuts = (
            processor is not None
            and graph.vision is not None
            and graph.vision.patches
            and graph.task_traits.images_in_text
        )
        _KNOWN[known] = _with_tiles(graph, *processor) if processor is not None and cuts else graph
    return _KNOWN[known]


def _with_tiles(graph: ModelGraph, folder: Path, settings: str) -> ModelGraph:
    """As the model's own processor cuts pictures. settings: its files."""
    key = cache_key(f"{graph.config_hash} {graph.task} {settings}", graph.attention, inline=False)
    found = None if graph_cache_is_off() else cached_graph(key)
    if found is None:
        from shardwright.models.image_processor import with_processor_tiles

        found = with_processor_tiles(graph, folder)
        store_graph(key, found)
    return found


def _find(section: ModelSection, config: JsonObject, text: str, inline: bool) -> ModelGraph:
    if graph_cache_is_off():
        return _trace(section, config, inline)
    # A recipe's own configuration is checked more strictly than a published one, so it is never
    # looked up as one.
    graph = None if inline else catalog_graph(text, section.attention)
    if graph is not None and section.task in ("auto", graph.task):
        return graph
    # One of the models that both tasks know is another graph under each.
    key = cache_key(
        text if section.task == "auto" else f"{section.task} {text}", section.attention, inline
    )
    graph = cached_graph(key)
    if graph is None:
        graph = _trace(section, config, inline)
        store_graph(key, graph)
    return graph


def _trace(section: ModelSection, config: JsonObject, inline: bool) -> ModelGraph:
    from shardwright.models.graph_trace import trace_model_graph
    from shardwright.models.remote_code import load_remote_code

    return trace_model_graph(
        config if inline else load_remote_code(section, config),
        section.attention,
        inline,
        section.task,
    )

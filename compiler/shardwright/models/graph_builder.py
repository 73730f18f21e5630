"""Stage 2: the recipe's `model` section -> ModelGraph. A graph that is known already comes without
torch: only graph.py, which traces a new one, imports it."""

from __future__ import annotations

import json
from pathlib import Path

from shardwright.diagnostics import Diagnostic
from shardwright.models.graph_cache import cache_key, cached_graph, graph_cache_is_off, store_graph
from shardwright.models.hub_files import local_processor, read_config
from shardwright.models.model_graph import ModelGraph
from shardwright.models.popular_graphs import catalog_graph
from shardwright.models.weights_check import (
    check_weights,
    find_untied_heads,
    tied_head_error,
    with_untied_head,
)
from shardwright.recipe.recipe_types import ModelSection
from shardwright.utils.json_types import JsonObject

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
            and not graph.contrastive
        )
        _KNOWN[known] = _with_tiles(graph, *processor) if processor is not None and cuts else graph
    return _KNOWN[known]


def _with_tiles(graph: ModelGraph, folder: Path, settings: str) -> ModelGraph:
    """As the model's own processor cuts pictures. settings: its files."""
    key = cache_key(f"{graph.config_hash} {graph.task} {settings}", graph.attention, inline=False)
    found = None if graph_cache_is_off() else cached_graph(key)
    if found is None:
        from shardwright.models.processor_stage import with_processor_tiles

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

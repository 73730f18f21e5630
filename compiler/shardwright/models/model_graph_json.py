"""Write and read model_graph.json of a compiled folder, so that it is explained without torch or a
network.

Decoder layers that differ only in their number are stored once, with `*` for their name.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from shardwright.models.model_graph import ModelGraph
from shardwright.utils.file_io import parse_json, read_regular_text_file
from shardwright.utils.json_values import read_record

GRAPH_FILE = "model_graph.json"
_NAME = "*"


def graph_to_json(graph: ModelGraph) -> str:
    """Write the graph as JSON; equal graphs give equal text."""
    document = dataclasses.asdict(dataclasses.replace(graph, layers=()))
    kinds: list[dict[str, Any]] = []
    places: list[tuple[str, int]] = []
    for layer in graph.layers:
        kind = dataclasses.asdict(layer)
        del kind["name"]
        for parameter in kind["parameters"]:
            if parameter["name"].startswith(f"{layer.name}."):
                parameter["name"] = _NAME + parameter["name"].removeprefix(layer.name)
        if kind not in kinds:
            kinds.append(kind)
        places.append((layer.name, kinds.index(kind)))
    return (
        json.dumps(
            {**document, "layer_kinds": kinds, "layers": places}, indent=1, ensure_ascii=False
        )
        + "\n"
    )


def graph_from_json(text: str) -> ModelGraph:
    """Read a graph. Raises ValueError where the text is not one."""
    document: Any = parse_json(text)
    try:
        kinds, layers = document.pop("layer_kinds"), []
        for name, number in document["layers"]:
            kind = kinds[number]
            parameters = [
                {**p, "name": p["name"].replace(_NAME, name, 1)} for p in kind["parameters"]
            ]
            layers.append({"name": name, **kind, "parameters": parameters})
        document["layers"] = layers
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"it lacks {error}") from None
    graph = read_record(ModelGraph, document)
    graph.verify()
    return graph


MAX_GRAPH_BYTES = 2**30
"""Bounds model_graph.json: far more than the largest model's."""


def read_graph(folder: Path) -> ModelGraph:
    return graph_from_json(read_regular_text_file(folder / GRAPH_FILE, MAX_GRAPH_BYTES))

"""Traces every shipped configuration and writes the graphs into the package."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path

from shardwright.models import graph_builder
from shardwright.models.graph_builder import graph_to_json
from shardwright.models.model_graph import ModelGraph
from shardwright.models.model_sources import catalog_config, catalog_ids

PATH = Path(graph_builder.__file__).with_name(graph_builder.ARCHIVE)


def config_text(model_id: str) -> str:
    return json.dumps(catalog_config(model_id), sort_keys=True)


def trace(text: str) -> ModelGraph:
    from shardwright.models.graph_trace import trace_model_graph

    return trace_model_graph(json.loads(text), graph_builder.ATTENTION, inline=False)


def archive_of(found: Mapping[str, ModelGraph]) -> bytes:
    """graphs.zip. `found`: configuration as text -> its graph. The same graphs are the same
    bytes."""
    members = {graph_builder.member(text): graph_to_json(graph) for text, graph in found.items()}
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, text in [
            (graph_builder.VERSIONS, json.dumps(graph_builder.versions())),
            *sorted(members.items()),
        ]:
            archive.writestr(
                zipfile.ZipInfo(name), text, zipfile.ZIP_DEFLATED, 9
            )  # ZipInfo: no clock, always 1980
    return content.getvalue()


def main() -> None:
    texts = dict.fromkeys(config_text(model_id) for model_id in catalog_ids())
    content = archive_of({text: trace(text) for text in texts})
    changed = not PATH.exists() or PATH.read_bytes() != content
    PATH.write_bytes(content)
    print(
        f"{PATH}: {len(texts)} graphs, {len(content):,} bytes, "
        f"{'changed' if changed else 'as before'}"
    )


if __name__ == "__main__":
    main()

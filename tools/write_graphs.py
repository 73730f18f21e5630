"""`make graphs`: traces every shipped configuration and writes the graphs into the package."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from shardwright.ir.model_graph import ModelGraph
from shardwright.model.popular import graphs
from shardwright.model.popular.shipped import shipped_config, shipped_ids

PATH = Path(graphs.__file__).with_name(graphs.ARCHIVE)


def config_text(model_id: str) -> str:
    return json.dumps(shipped_config(model_id), sort_keys=True)


def trace(text: str) -> ModelGraph:
    from shardwright.model.graph import trace_model_graph

    return trace_model_graph(json.loads(text), graphs.ATTENTION, inline=False)


def main() -> None:
    texts = dict.fromkeys(config_text(model_id) for model_id in shipped_ids())
    content = graphs.archive_of({text: trace(text) for text in texts})
    changed = not PATH.exists() or PATH.read_bytes() != content
    PATH.write_bytes(content)
    print(f"{PATH}: {len(texts)} graphs, {len(content):,} bytes, {'changed' if changed else 'as before'}")


if __name__ == "__main__":
    sys.exit(main())

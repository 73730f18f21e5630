"""A processor whose package is missing names the package, at compile."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from shardwright.diagnostics import Refusal
from shardwright.hf.processor import MissingPackage, inline_processor, load_processor, processor_files
from shardwright.model import processor
from shardwright.model.graph import trace_model_graph
from tests.parity.sight import MODELS


class Placeholder:
    """As transformers stands one in for a class whose package is not installed."""

    _backends = ("a_package_that_is_nowhere",)


def test_the_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = trace_model_graph({"model_type": "llava", **MODELS["llava"]}, "auto", inline=True)
    config = processor._config(graph)
    for name, content in processor_files(inline_processor(config), config).items():
        (tmp_path / name).write_bytes(content)
    processor.check_processor(graph, tmp_path)

    def placeholder(kind: object, backends: object) -> None:
        if backends:
            raise ImportError("\nLlavaProcessor requires the Torchvision library but it was not found.")

    monkeypatch.setattr("shardwright.hf.processor.requires_backends", placeholder)
    monkeypatch.setattr(transformers, "LlavaProcessor", Placeholder)
    with pytest.raises(MissingPackage, match="torchvision"):
        load_processor(tmp_path)
    with pytest.raises(Refusal) as refused:
        processor.check_processor(graph, tmp_path)
    (told,) = refused.value.diagnostics
    assert told.code == "SW2080" and "torchvision" in told.message and "pip install torchvision" in str(told.help)

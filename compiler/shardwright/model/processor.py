"""The processor of a model whose configuration stands in the recipe, as files of the compiled folder."""

from __future__ import annotations

from transformers import AutoConfig

from shardwright.diagnostics import refusal
from shardwright.hf.floats import untagged
from shardwright.hf.pair_processor import pair_processor_files
from shardwright.hf.processor import NoProcessor, inline_processor, processor_files
from shardwright.ir.model_graph import ModelGraph


def inline_processor_files(graph: ModelGraph) -> dict[str, bytes]:
    """Name -> content. Errors: SW2020."""
    document = dict(untagged(dict(graph.config)))
    config = AutoConfig.for_model(str(document.pop("model_type")), **document)
    try:
        return pair_processor_files(config) if graph.contrastive else processor_files(inline_processor(config), config)
    except NoProcessor as why:
        raise refusal(
            "SW2020",
            f"a {graph.model_type!r} of this configuration gets no processor: {why}",
            "A model.source brings its own; of a configuration in the recipe the processor is made from the tower's "
            "sizes, and its tokenizer is a token a byte.",
            ("model", "config"),
        ) from None

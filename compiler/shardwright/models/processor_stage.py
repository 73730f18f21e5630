"""The processor of a model that sees: as files of the compiled folder, where its configuration
stands in the recipe; and into how many tiles it cuts a picture."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from transformers import AutoConfig, PretrainedConfig

from shardwright.diagnostics import Refusal, refusal
from shardwright.models.config_special_floats import decode_special_floats
from shardwright.models.image_processor import (
    MissingPackage,
    ProcessorUnavailable,
    default_image_processor,
    load_processor,
    processor_files,
    processor_from_config,
)
from shardwright.models.image_tiles import max_tiles, tile_counts
from shardwright.models.model_graph import ModelGraph
from shardwright.models.model_refusals import missing_processor_package
from shardwright.models.pair_processor import pair_processor_files
from shardwright.models.tasks.image_formats import vision_encoder_shape
from shardwright.models.vision_encoder_cost import VisionEncoder


def with_usual_tiles(
    vision: VisionEncoder, config: PretrainedConfig, *, inline: bool
) -> VisionEncoder:
    """As the type's own defaults cut a picture, or the processor that a configuration in the recipe
    gets; whole where it has none, or one that needs a package which is not here (compiling
    tells)."""
    if not vision.patches:
        return vision
    tower = vision_encoder_shape(config)
    try:
        if inline:
            return _cut(vision, tile_counts(processor_from_config(config), tower))
        return dataclasses.replace(vision, tiles=max_tiles(*default_image_processor(config), tower))
    except ProcessorUnavailable:
        return vision


def with_processor_tiles(graph: ModelGraph, folder: Path) -> ModelGraph:
    """As the processor in `folder` cuts. The graph itself where its files cannot be used: preparing
    tells why. Where a package is missing, compiling does (check_processor)."""
    assert graph.vision is not None
    tower = vision_encoder_shape(_config(graph))
    try:
        found = tile_counts(load_processor(folder), tower)
    except ProcessorUnavailable:
        return graph
    return dataclasses.replace(graph, vision=_cut(graph.vision, found))


def _cut(vision: VisionEncoder, found: list[tuple[int, int]]) -> VisionEncoder:
    """found: (tiles, tokens) of pictures of several sizes."""
    per_token = (
        max((tiles / tokens for tiles, tokens in found if tokens), default=0.0) * vision.patches
    )
    tiles = max(tiles for tiles, _ in found)
    return dataclasses.replace(
        vision, tiles=tiles, patches_per_token=per_token or vision.patches_per_token
    )


def _config(graph: ModelGraph) -> PretrainedConfig:
    document = dict(decode_special_floats(dict(graph.config)))
    return AutoConfig.for_model(str(document.pop("model_type")), **document)


def check_processor(graph: ModelGraph, folder: Path) -> None:
    """Raises Refusal where the model's own processor needs a package that is not installed:
    SW2080."""
    try:
        load_processor(folder)
    except MissingPackage as why:
        raise Refusal(missing_processor_package(graph.model_type, str(why), why.package)) from None
    except ProcessorUnavailable:
        return  # preparing tells why


def processor_files_from_config(graph: ModelGraph) -> dict[str, bytes]:
    """Name -> content. Errors: SW2020, SW2080."""
    config = _config(graph)
    try:
        return (
            pair_processor_files(config)
            if graph.contrastive
            else processor_files(processor_from_config(config), config)
        )
    except MissingPackage as why:
        raise Refusal(missing_processor_package(graph.model_type, str(why), why.package)) from None
    except ProcessorUnavailable as why:
        raise refusal(
            "SW2020",
            f"a {graph.model_type!r} of this configuration gets no processor: {why}",
            "A model.source brings its own; of a configuration in the recipe the processor is made "
            "from the tower's sizes, and its tokenizer is a token a byte.",
            ("model", "config"),
        ) from None

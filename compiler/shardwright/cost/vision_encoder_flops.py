"""What the tower of a model that sees computes and keeps: FLOPs and bytes of the largest row that
`data.images` allows.

The tower stands on the first stage, whole on each tensor rank, and runs in every micro-batch.
Letters: n patches of a picture; FLOPs and bytes are a n + b n^2 of it
(models/model_graph.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardwright.models.model_graph import ModelGraph, VisionEncoder, VisionLayer
from shardwright.models.trainable_parameters import frozen_parameter_names
from shardwright.recipe.literal_types import Checkpointing
from shardwright.recipe.recipe_types import Recipe

INPUT_GRADIENT_SHARE = 0.5
"""Of a backward pass, where the weights are frozen and what comes before them is not: one product
of two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceImages:
    """pictures: that the tower sees of a row, each tile of one that is cut; patches: of each."""

    image_count: int
    patches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionLayerCost:
    """forward, backward: FLOPs of a row. again: of what is run a second time. kept: bytes."""

    layer: VisionLayer
    forward: int
    backward: float
    recompute_flops: int
    activation_bytes: int


def largest_image_sequence(recipe: Recipe, graph: ModelGraph) -> SequenceImages | None:
    """As many pictures of the largest size as the contract allows and a row has tokens for; None
    where the tower is not counted."""
    images = next(
        (part.images for _, part in recipe.dataset_sections() if part.images is not None), None
    )
    vision = graph.vision
    if vision is None or not vision.layers:
        return None
    if graph.task_traits.compares_pairs:
        return SequenceImages(image_count=1, patches=vision.patches)
    if images is None:
        return None
    tiles = vision.tiles if images.tiles else 1
    room = int(recipe.training.sequence_length * vision.patches_per_token)
    patches = vision.patches_per_image(images.max_pixels)
    if not vision.patches:
        patches = max(1, min(patches, room))
    return SequenceImages(
        image_count=max(1, min(images.per_row * tiles, room // patches)), patches=patches
    )


def vision_encoder_flops(recipe: Recipe, graph: ModelGraph) -> tuple[int, int]:
    """Of a row: (forward, backward)."""
    layers = list(vision_encoder_layer_costs(recipe, graph, "none", 4))
    return sum(x.forward for x in layers), round(sum(x.backward for x in layers))


def vision_encoder_activation_bytes(
    recipe: Recipe, graph: ModelGraph, checkpointing: Checkpointing, element_bytes: int
) -> int:
    """Of a row, from its forward to its backward pass."""
    return sum(
        each.activation_bytes
        for each in vision_encoder_layer_costs(recipe, graph, checkpointing, element_bytes)
    )


def vision_encoder_layer_costs(
    recipe: Recipe, graph: ModelGraph, checkpointing: Checkpointing, element_bytes: int
) -> Iterator[VisionLayerCost]:
    """A layer has a backward pass where it, or one before it, is trained. Under `full` a block
    keeps its input and runs again; the rest of the tower stays."""
    row, vision = largest_image_sequence(recipe, graph), graph.vision
    if row is None or vision is None:
        return
    trained = _trained(recipe, graph, vision)
    live = trained[""]  # the patches' own projection comes before the blocks
    for layer in vision.layers:
        mode: Checkpointing = "full" if checkpointing == "full" and layer.name else "none"
        live = live or trained[layer.name] or (not layer.name and trained["projector"])
        forward = row.image_count * layer.forward.of(row.patches)
        share = (
            0.0
            if not live
            else 1.0
            if trained[layer.name] or not layer.name
            else INPUT_GRADIENT_SHARE
        )
        activation_bytes = next(
            k for k in layer.kept if (k.checkpointing, k.element_bytes) == (mode, element_bytes)
        )
        yield VisionLayerCost(
            layer=layer,
            forward=forward,
            backward=share * row.image_count * layer.backward.of(row.patches),
            recompute_flops=forward if live and mode == "full" else 0,
            activation_bytes=row.image_count * activation_bytes.bytes.of(row.patches)
            if live
            else 0,
        )


def _trained(recipe: Recipe, graph: ModelGraph, vision: VisionEncoder) -> dict[str, bool]:
    """By the name of a layer, whether any parameter of it is: "" the tower's own outside its
    blocks, "projector"."""
    found = dict.fromkeys([*(layer.name for layer in vision.layers), "projector"], False)
    if recipe.lora is not None:
        return found
    frozen = frozen_parameter_names(graph, recipe.model.freeze)
    untrained = frozenset(graph.cut.untrained)
    for parameter in graph.layers[0].parameters:
        part = vision.part(parameter.name)
        if part == "text" or parameter.name in frozen or parameter.name in untrained:
            continue
        block = next(
            (x.name for x in vision.layers if x.name and parameter.name.startswith(f"{x.name}.")),
            "",
        )
        found["projector" if part == "projector" else block] = True
    return found

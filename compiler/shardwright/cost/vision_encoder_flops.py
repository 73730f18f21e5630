"""Count the vision encoder's FLOPs and saved bytes for the largest sequence that `data.images`
allows.

The encoder is on the first stage, replicated on each tensor rank, and runs in every micro-batch.
FLOPs and bytes of an image with n patches are a n + b n^2 (models/model_graph.py).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from shardwright.models.model_graph import ModelGraph, VisionEncoder, VisionLayer
from shardwright.models.trainable_parameters import frozen_parameter_names
from shardwright.recipe.literal_types import Checkpointing
from shardwright.recipe.recipe_types import Recipe
from shardwright.utils.memoize import memoize

INPUT_GRADIENT_SHARE = 0.5
"""Gives the share of a backward pass with frozen weights behind trained ones: one product of
two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceImages:
    """Count the images of a sequence, each tile of a split image, and the patches of each."""

    image_count: int
    patches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionLayerCost:
    """Count one layer's work for a sequence.

    forward, backward: FLOPs
    recompute_flops: recomputed
    activation_bytes: saved
    """

    layer: VisionLayer
    forward: int
    backward: float
    recompute_flops: int
    activation_bytes: int


def largest_image_sequence(recipe: Recipe, graph: ModelGraph) -> SequenceImages | None:
    """Return as many images of the largest size as the data allows and a sequence has tokens for.

    Returns None where the vision encoder is not counted.
    """
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
    """Return (forward, backward) FLOPs of a sequence."""
    layers = vision_encoder_layer_costs(recipe, graph, "none", 4)
    return sum(x.forward for x in layers), round(sum(x.backward for x in layers))


def vision_encoder_activation_bytes(
    recipe: Recipe, graph: ModelGraph, checkpointing: Checkpointing, element_bytes: int
) -> int:
    """Return the saved bytes of a sequence."""
    return sum(
        each.activation_bytes
        for each in vision_encoder_layer_costs(recipe, graph, checkpointing, element_bytes)
    )


def _layer_costs_key(
    recipe: Recipe, graph: ModelGraph, checkpointing: Checkpointing, element_bytes: int
) -> Hashable:
    images = largest_image_sequence(recipe, graph)
    is_frozen = recipe.lora is not None
    return graph.identity, images, is_frozen, recipe.model.freeze, checkpointing, element_bytes


@memoize(_layer_costs_key)
def vision_encoder_layer_costs(
    recipe: Recipe, graph: ModelGraph, checkpointing: Checkpointing, element_bytes: int
) -> tuple[VisionLayerCost, ...]:
    """Return the cost of each layer.

    A layer has a backward pass where it, or an earlier one, is trained. Under `full` a block saves
    its input and is recomputed; the rest of the encoder saves everything.
    """
    row, vision = largest_image_sequence(recipe, graph), graph.vision
    if row is None or vision is None:
        return ()
    costs: list[VisionLayerCost] = []
    trained = _trained(recipe, graph, vision)
    live = trained[""]  # the patch projection comes before the blocks
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
        costs.append(
            VisionLayerCost(
                layer=layer,
                forward=forward,
                backward=share * row.image_count * layer.backward.of(row.patches),
                recompute_flops=forward if live and mode == "full" else 0,
                activation_bytes=row.image_count * activation_bytes.bytes.of(row.patches)
                if live
                else 0,
            )
        )
    return tuple(costs)


def _trained(recipe: Recipe, graph: ModelGraph, vision: VisionEncoder) -> dict[str, bool]:
    """Map each layer's name to whether any of its parameters is trained.

    "" stands for the encoder outside its blocks; "projector" is the projector.
    """
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

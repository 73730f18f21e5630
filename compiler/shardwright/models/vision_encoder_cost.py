"""The tower of a model that sees, as parts of the piece that holds the embedding: what each
computes and keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwright.recipe.literal_types import Checkpointing

ModelPart = Literal["vision", "projector", "text"]
"""Of a model that sees: the tower; what brings its features to the decoder's width; the decoder
with its embedding and head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageCost:
    """FLOPs, or bytes, of one picture (or tile) of n patches: per_image + per_patch n + per_pair
    n^2."""

    per_image: int = 0
    per_patch: int = 0
    per_pair: int = 0

    def of(self, patches: int) -> int:
        return self.per_image + (self.per_patch + self.per_pair * patches) * patches


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedVisionActivations:
    """Bytes that a layer of the tower keeps for its backward pass; checkpointing and element_bytes
    as in model_graph.Kept."""

    checkpointing: Checkpointing
    element_bytes: int
    bytes: ImageCost


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionLayer:
    """A layer of its own kind, `vision`: one block of a tower; or, with name "", all that stands
    around the blocks, the projector included.

    widths: (out, in) of its widest matrix; (0, 0) where it has none.
    """

    name: str  # "model.visual.blocks.0"
    widths: tuple[int, int]
    forward: ImageCost
    backward: ImageCost
    kept: tuple[SavedVisionActivations, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionEncoder:
    """patch: pixels of a patch's side. patches: of every picture, or tile of one, whatever its
    size; 0 where its size decides. tiles: that a picture is cut into at the most, the whole one
    among them. patches_per_token: that become one token of a row.

    layers: in the order in which they run, the one around them last; () where untraced says why
    they could not be run. tower, projector: paths of modules and of single parameters; what lies
    under both is the projector's, what lies
        under neither is the text part.
    """

    patch: int
    patches: int
    patches_per_token: float
    layers: tuple[VisionLayer, ...]
    tower: tuple[str, ...]
    projector: tuple[str, ...]
    untraced: str = ""
    tiles: int = 1

    def patches_per_image(self, pixels: int) -> int:
        """Of a picture with so many pixels, or of a tile."""
        return self.patches or max(1, pixels // self.patch**2)

    def part(self, parameter: str) -> ModelPart:
        if _lies_under(parameter, self.projector):
            return "projector"
        return "vision" if _lies_under(parameter, self.tower) else "text"


def _lies_under(name: str, paths: tuple[str, ...]) -> bool:
    return any(f"{name}.".startswith(f"{path}.") for path in paths)

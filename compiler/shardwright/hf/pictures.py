"""Small pictures for a tiny copy of a model that sees, in the shapes that its forward takes.

No type is named: the shapes are tried one by one on the model's own `get_image_features`, and the rows that come back
say how many tokens of a row stand for a picture. Shapes: N pictures, C channels, H and W pixels, P a patch's side,
T frames of a patch.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from shardwright.hf.raised import first_line
from shardwright.hf.skeleton import Batch

IMAGE_TOKENS = ("image_token_id", "image_token_index", "im_start_id", "media_placeholder_token_id", "image_token")
_SIDE = 4
_ROWS, _TEXT = 2, 12
_FIRST_PLAIN = 20
"""The special tokens of a shrunk configuration have lower ids."""


class NoPictures(Exception):
    """The model takes no pictures in a shape that is known here: one line, the reason."""


def image_token(config: Any) -> int | None:
    """The id that stands for (a part of) a picture in a row."""
    return next((v for name in IMAGE_TOKENS if isinstance(v := getattr(config, name, None), int)), None)


def tower_config(config: Any) -> Any:
    """The part of the configuration that describes the tower. Raises NoPictures."""
    parts = [getattr(config, name, None) for name in ("vision_config", "visual_config", "vision_tower_config")]
    found = next((part for part in parts if getattr(part, "patch_size", None) is not None), None)
    if found is None:
        raise NoPictures("its configuration has no tower with a patch size")
    return found


@torch.no_grad()
def picture_example(model: nn.Module, vocabulary: int) -> tuple[torch.Tensor, Batch]:
    """(ids (2, S), what the forward takes beside them): a picture in each row. Raises NoPictures."""
    config: Any = model.config
    token = image_token(config)
    if token is None:
        raise NoPictures("its configuration names no token that stands for a picture")
    names = set(inspect.signature(type(model).forward).parameters)
    features: Any = getattr(model, "get_image_features", None)
    if features is None:
        raise NoPictures("it has no get_image_features")
    why = ""
    for given in _candidates(config, names):
        taken = {n: v for n, v in given.items() if n in inspect.signature(features).parameters}
        try:
            rows = _rows(features(**taken))
        except Exception as error:  # whatever a type's own code raises on another type's shape
            why = first_line(error, 120)
            continue
        if rows % _ROWS:
            why = f"{rows} rows of features for {_ROWS} pictures of one size"
            continue
        ids, places = _ids(token, rows // _ROWS, vocabulary)
        beside = given | {n: places for n in ("mm_token_type_ids", "token_type_ids") if n in names}
        try:
            model(input_ids=ids, use_cache=False, **beside)
        except Exception as error:
            why = first_line(error, 120)
            continue
        return ids, beside
    raise NoPictures(f"its tower takes none of the known shapes of a picture ({why})")


def _ids(token: int, count: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, 1 where they stand for a picture): the picture at another place in each row."""
    ids = torch.randint(_FIRST_PLAIN, vocabulary - 10, (_ROWS, count + _TEXT))
    for row in range(_ROWS):
        ids[row, 3 + row : 3 + row + count] = token
    return ids, (ids == token).long()


def _rows(output: Any) -> int:
    """Features that get_image_features returned: one a placeholder."""
    found = getattr(output, "pooler_output", output)
    if isinstance(found, torch.Tensor):
        return found.numel() // found.shape[-1]
    return sum(_rows(part) for part in found)


def _candidates(config: Any, names: set[str]) -> Iterator[dict[str, torch.Tensor]]:
    """A picture a row; the first that the model takes is it."""
    tower = tower_config(config)
    channels = next((v for n in ("num_channels", "in_channels", "in_chans") if (v := getattr(tower, n, None))), 3)
    patch = tower.patch_size if isinstance(tower.patch_size, int) else tower.patch_size[0]
    merge = getattr(tower, "spatial_merge_size", None) or getattr(config, "spatial_merge_size", None) or 1
    side = getattr(tower, "image_size", None) or patch * _SIDE
    side = side if isinstance(side, int) else side[0]
    if "image_grid_thw" in names:
        frames = getattr(tower, "temporal_patch_size", 1)
        grid = torch.tensor([[1, 2 * merge, 2 * merge]] * _ROWS)
        yield {
            "pixel_values": torch.randn(int(grid.prod(-1).sum()), channels * frames * patch * patch),
            "image_grid_thw": grid,
        }
    sizes = {"image_sizes": torch.tensor([[side, side]] * _ROWS)} if "image_sizes" in names else {}
    for beside in (sizes, {}) if sizes else ({},):
        for pixels in ((_ROWS, channels, side, side), (_ROWS, 1, channels, side, side)):
            yield {"pixel_values": torch.randn(pixels), **beside}

"""The shapes in which towers take pictures. What a forward takes beside the pixels tells which of
them it may be; no type is named.

N pictures of all rows, B rows, C channels, H and W pixels, P a patch's side, T frames of a patch, n
patches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch

Pictures = Mapping[str, torch.Tensor]
ImageRows = Sequence[Sequence[int]]
"""For each row its pictures, by width: 1 is a square, 2 is half as wide again. A shape of fixed
size ignores it."""

_TILES = 5
"""Of a picture that is cut into tiles: the whole one, and up to four parts."""


class UnsupportedImages(Exception):
    """The model takes no pictures in a shape that is known here: one line, the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionEncoderShape:
    """What a configuration says of its pictures. cell: patches on a side that become one token;
    side: pixels of a picture of fixed size, fine_side of its copy for a second tower, 0 where there
    is none. times: as large as the smallest are the sides of a picture that may have any size."""

    channels: int
    patch: int
    cell: int
    frames: int
    side: int
    fine_side: int
    times: int = 1


MakeImages = Callable[[VisionEncoderShape, ImageRows], dict[str, torch.Tensor]]


def shapes(names: set[str]) -> Iterator[MakeImages]:
    """What may fit a forward that takes these names, the likeliest first."""
    for key, found in _BY_KEY.items():
        if key in names:
            yield from (partial(_beside, make, names) for make in found)
    extra = names & _SIDES.keys()
    for kept in (extra, set()) if extra else (extra,):
        sized: tuple[Any, ...] = (_tiles,) if "image_sizes" in kept else ()
        yield from (partial(make, kept) for make in (_images, *sized, _of_rows))
    yield _rows_of_patches


def patches(tower: VisionEncoderShape, made: Pictures) -> int:
    """Of all pictures in `made`, those that only fill up included; in squares of the patch's
    side."""
    found = made["pixel_values"].numel() // (tower.channels * tower.patch**2)
    grid = made.get("image_grid_thw")
    # A patch of Qwen's has each pixel as often as it has frames.
    return (
        found // tower.frames
        if grid is not None and found == int(grid.prod()) * tower.frames
        else found
    )


def vision_encoder_config(config: Any) -> Any:
    """The part of the configuration that describes the tower. Raises UnsupportedImages."""
    found = next(
        (part for part in _parts(config) if getattr(part, "patch_size", None) is not None), None
    )
    if found is None:
        raise UnsupportedImages("its configuration has no tower with a patch size")
    return found


def _parts(config: Any) -> Iterator[Any]:
    towers = [
        getattr(config, name, None)
        for name in ("vision_config", "visual_config", "vision_tower_config")
    ]
    for tower in towers:
        yield tower
        yield from (getattr(tower, name, None) for name in ("sam_config", "encoder_config"))
    yield config


def vision_encoder_shape(config: Any) -> VisionEncoderShape:
    """Raises UnsupportedImages."""
    part = vision_encoder_config(config)
    patch = _number(part.patch_size)
    fine = getattr(config, "high_res_vision_config", None)
    return VisionEncoderShape(
        channels=next(
            (
                v
                for n in ("num_channels", "in_channels", "in_chans")
                if (v := getattr(part, n, None))
            ),
            3,
        ),
        patch=patch,
        cell=next((v for owner in (part, config) if (v := _cell(owner))), 1),
        frames=next((_number(v) for n in _FRAMES if (v := getattr(part, n, None))), 1),
        side=_number(getattr(part, "image_size", None)) or patch * 4,
        fine_side=_number(getattr(fine, "image_size", None)),
    )


_FRAMES = ("temporal_patch_size", "patch_temporal")
_CELLS = (
    "spatial_merge_size",
    "merge_size",
    "pooling_kernel_size",
    "merge_kernel_size",
    "downsample_factor",
)


def _cell(config: Any) -> int:
    ratio = getattr(config, "downsample_ratio", None)
    said = next((_number(v) for name in _CELLS if (v := getattr(config, name, None))), 0)
    return said or (round(1 / ratio) if isinstance(ratio, float) and ratio else 0)


def _number(size: Any) -> int:
    """Of a side: some configurations say height and width. 0: it says none."""
    first = size[0] if isinstance(size, list | tuple) and size else size
    return first if isinstance(first, int) else 0


def _flat(rows: ImageRows) -> list[int]:
    return list(chain.from_iterable(rows))


def _grid(tower: VisionEncoderShape, rows: ImageRows) -> torch.Tensor:
    """(N, 2): patches of each picture's height and width, where its size is its own."""
    return tower.times * torch.tensor(
        [[2 * tower.cell, (1 + width) * tower.cell] for width in _flat(rows)]
    )


def _beside(
    make: MakeImages, names: set[str], tower: VisionEncoderShape, rows: ImageRows
) -> dict[str, torch.Tensor]:
    """With what only some types take beside a grid."""
    made = make(tower, rows)
    if "image_merge_sizes" in names:
        made["image_merge_sizes"] = torch.full((len(_flat(rows)),), tower.cell)
    return made


def _patches(
    key: str, form: str, tower: VisionEncoderShape, rows: ImageRows
) -> dict[str, torch.Tensor]:
    """The patches of all pictures one behind the other."""
    grid, c, t, p = _grid(tower, rows), tower.channels, tower.frames, tower.patch
    if form == "token":  # a square of patches that become one token is counted, and held, as one
        grid, p = grid // tower.cell, p * tower.cell
    n = int(grid.prod(-1).sum())
    size = {
        "flat": (n, c * t * p * p),
        "square": (n, c, p, p),
        "one frame": (n, c * p * p),
        "token": (n, p, p, c),
    }
    frames = torch.ones(len(grid), 1, dtype=grid.dtype)
    return {
        "pixel_values": torch.randn(size[form]),
        key: torch.cat([frames, grid], 1) if "thw" in key else grid,
    }


def _packed(tower: VisionEncoderShape, rows: ImageRows) -> dict[str, torch.Tensor]:
    """As a strip (1, C, P, n P)."""
    grid = 2 * _grid(tower, rows)
    pixels = torch.randn(1, tower.channels, tower.patch, int(grid.prod(-1).sum()) * tower.patch)
    return {"pixel_values": pixels, "target_sizes": grid.int()}


def _padded(tower: VisionEncoderShape, rows: ImageRows) -> dict[str, torch.Tensor]:
    """(N, most patches of a picture, C P P), those that are none masked."""
    grid = _grid(tower, rows)
    there = torch.arange(int(grid.prod(-1).max())) < grid.prod(-1, keepdim=True)
    pixels = torch.randn(*there.shape, tower.channels * tower.patch**2)
    return {"pixel_values": pixels, "spatial_shapes": grid, "pixel_attention_mask": there.long()}


def _placed(
    patch_of_tokens: bool, tower: VisionEncoderShape, rows: ImageRows
) -> dict[str, torch.Tensor]:
    """(N, most patches, C P P), each with its column and row. patch_of_tokens: a patch is as large
    as a token."""
    grid, cell = _grid(tower, rows), tower.cell
    grid, side = (grid // cell, tower.patch * cell) if patch_of_tokens else (grid, tower.patch)
    places = torch.full((len(grid), int(grid.prod(-1).max()), 2), -1)
    for picture, (height, width) in enumerate(grid.tolist()):
        each = torch.cartesian_prod(torch.arange(height), torch.arange(width)).flip(-1)
        places[picture, : height * width] = each
    pixels = torch.rand(*places.shape[:2], tower.channels * side**2)
    return {"pixel_values": pixels, "image_position_ids": places}


def _pooled(tower: VisionEncoderShape, rows: ImageRows) -> dict[str, torch.Tensor]:
    """One view a picture, (N, n, C P P), and for each token the four patches that it is made of."""
    n, count = (tower.side // tower.patch) ** 2, len(_flat(rows))
    side = tower.side // tower.patch
    cells = torch.arange(n).view(side // 2, 2, side // 2, 2).transpose(1, 2).reshape(-1, 4)
    pooling = torch.cat([cells + picture * n for picture in range(count)])
    grids = torch.tensor([[side // 2, side // 2, 0, 0]] * count)
    pixels = torch.randn(count, n, tower.channels * tower.patch**2)
    return {"pixel_values": pixels, "image_token_pooling": pooling, "image_grids": grids} | {
        "image_num_crops": torch.ones(count, dtype=torch.long)
    }


def _images(extra: set[str], tower: VisionEncoderShape, rows: ImageRows) -> dict[str, torch.Tensor]:
    """(N, C, H, W)"""
    count = len(_flat(rows))
    return {"pixel_values": torch.randn(count, tower.channels, tower.side, tower.side)} | _sides(
        extra, tower, (count,)
    )


def _tiles(extra: set[str], tower: VisionEncoderShape, rows: ImageRows) -> dict[str, torch.Tensor]:
    """(N, tiles, C, H, W): a picture of two tiles by two, or of one by two, whose last tiles are
    none."""
    high = [2 - (width > 1) for width in _flat(rows)]
    pixels = torch.randn(len(high), _TILES, tower.channels, tower.side, tower.side)
    made = {"pixel_values": pixels} | _sides(extra, tower, (len(high),))
    if "image_sizes" in made:
        made["image_sizes"] = torch.tensor([[tower.side * each, tower.side * 2] for each in high])
    return made


def _of_rows(
    extra: set[str], tower: VisionEncoderShape, rows: ImageRows
) -> dict[str, torch.Tensor]:
    """(B, most pictures of a row, C, H, W), zeros where a row has fewer."""
    there = torch.tensor(
        [[place < len(row) for place in range(max(1, *map(len, rows)))] for row in rows]
    )
    pixels = (
        torch.randn(*there.shape, tower.channels, tower.side, tower.side)
        * there[:, :, None, None, None]
    )
    made = {"pixel_values": pixels} | _sides(extra, tower, tuple(there.shape))
    if "pixel_attention_mask" in made:
        made["pixel_attention_mask"] = there
    return made


def _rows_of_patches(tower: VisionEncoderShape, rows: ImageRows) -> dict[str, torch.Tensor]:
    """(N, n, C P P)"""
    count = len(_flat(rows))
    return {
        "pixel_values": torch.randn(
            count, (tower.side // tower.patch) ** 2, tower.channels * tower.patch**2
        )
    }


_SIDES: dict[str, Callable[[VisionEncoderShape, tuple[int, ...]], torch.Tensor]] = {
    "image_sizes": lambda tower, shape: torch.full((*shape, 2), tower.side),
    "pixel_mask": lambda tower, shape: torch.ones(*shape, tower.side, tower.side, dtype=torch.bool),
    "pixel_attention_mask": lambda tower, shape: torch.ones(
        *shape, tower.side, tower.side, dtype=torch.bool
    ),
    "high_res_pixel_values": lambda tower, shape: torch.randn(
        *shape, tower.channels, tower.fine_side, tower.fine_side
    ),
}
"""What stands beside pictures of fixed size: by name, for that many of them."""


def _sides(
    extra: set[str], tower: VisionEncoderShape, shape: tuple[int, ...]
) -> dict[str, torch.Tensor]:
    return {name: _SIDES[name](tower, shape) for name in sorted(extra)}


_FORMS = ("flat", "square", "one frame", "token")
_BY_KEY: dict[str, tuple[MakeImages, ...]] = {
    "image_grid_thw": tuple(partial(_patches, "image_grid_thw", form) for form in _FORMS),
    "image_grid_hw": (partial(_patches, "image_grid_hw", "one frame"),),
    "target_sizes": (_packed,),
    "spatial_shapes": (_padded,),
    "image_position_ids": (partial(_placed, False), partial(_placed, True)),
    "image_token_pooling": (_pooled,),
}

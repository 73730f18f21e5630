"""Small pictures for a tiny copy of a model that sees, in the shapes that its forward takes.

No type is named: the shapes (models/tasks/vision_language.py) are tried one by one on the model's
own `get_image_features`, and the rows that come back say how many tokens of a row stand for a
picture.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from shardwright.models.model_skeleton import Batch
from shardwright.models.tiny_config import token_ids
from shardwright.utils.exception_summary import exception_summary

# The shapes in which towers take pictures. What a forward takes beside the pixels tells which of
# them it may be; no type is named.
#
# N pictures of all rows, B rows, C channels, H and W pixels, P a patch's side, T frames of a patch,
# n
# patches.


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


__all__ = [
    "ImageSequences",
    "UnsupportedImages",
    "example_images",
    "find_image_sequences",
    "forward_input_names",
    "image_features",
    "image_token",
    "vision_encoder_config",
]

IMAGE_TOKENS = (
    "image_token_id",
    "image_token_index",
    "im_start_id",
    "media_placeholder_token_id",
    "image_token",
)
_PLACES = ("mm_token_type_ids", "token_type_ids")
_MASK = "image_embeds_position_mask"
"""Says where a row's pictures stand, for a type that has no token of its own for them."""
_ONE_A_ROW: ImageRows = ((1,), (1,))
_TEXT = 12


def image_token(config: Any) -> int | None:
    """The id that stands for (a part of) a picture in a row."""
    return next(
        (v for name in IMAGE_TOKENS if isinstance(v := getattr(config, name, None), int)), None
    )


def image_features(model: nn.Module) -> Callable[..., Any]:
    """What makes of pictures the features that take the places of their tokens. It leaves out what
    it does not take. Raises UnsupportedImages."""
    found = [each for each in _all_features(model) if "pixel_values" in _parameters(each)]
    if not found:
        raise UnsupportedImages("it has no get_image_features")
    taken = _taken(found)
    return lambda **given: found[0](
        **{name: value for name, value in given.items() if name in taken}
    )


def _all_features(model: nn.Module) -> Iterator[Callable[..., Any]]:
    """The outermost first."""
    return (
        features
        for m in model.modules()
        if (features := getattr(m, "get_image_features", None)) is not None
    )


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def _taken(functions: Sequence[Callable[..., Any]]) -> set[str]:
    """Names that the first takes: those of the next too, where it hands on what it does not
    name."""
    found: set[str] = set()
    for function in functions:
        parameters = _parameters(function).values()
        found |= {p.name for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD}
        if all(p.kind is not inspect.Parameter.VAR_KEYWORD for p in parameters):
            break
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSequences:
    """Makes rows for one tiny model. token: that stands for a picture; names: of what its forward
    takes."""

    model: nn.Module
    make: MakeImages
    tower: VisionEncoderShape
    token: int
    names: frozenset[str]
    vocabulary: int

    def rows(
        self, rows: ImageRows, length: int | None = None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """(ids (B, S), what the forward takes beside them): text around the pictures of each row,
        each row beginning at another place. length: S; None is as short as it may be."""
        counts = {width: self.tokens(width) for width in {width for row in rows for width in row}}
        needed = max(sum(counts[width] + 1 for width in row) for row in rows) + _TEXT
        plain = torch.tensor(token_ids(self.model.config).plain)
        ids = plain[torch.randint(len(plain), (len(rows), length or needed))]
        places = torch.zeros_like(ids)
        for number, row in enumerate(rows):
            at = 3 + number % 2
            for width in row:
                places[number, at : at + counts[width]] = 1
                at += counts[width] + 1  # a word between two pictures
        ids[places.bool()] = self.token
        beside = self.make(self.tower, rows) if any(rows) else {}
        return ids, beside | self._marks(places)

    def _marks(self, places: torch.Tensor) -> dict[str, torch.Tensor]:
        marks = {name: places for name in _PLACES if name in self.names}
        return marks | ({_MASK: places.bool()} if _MASK in self.names else {})

    @torch.no_grad()
    def tokens(self, width: int) -> int:
        """That stand for a picture of that width."""
        return sum(_counts(image_features(self.model)(**self.make(self.tower, [[width]]))))


@torch.no_grad()
def find_image_sequences(model: nn.Module, vocabulary: int) -> ImageSequences:
    """The first shape that the model takes. Raises UnsupportedImages."""
    config: Any = model.config
    names = forward_input_names(model)
    token = token_ids(config).plain[0] if _MASK in names else image_token(config)
    if token is None:
        raise UnsupportedImages("its configuration names no token that stands for a picture")
    tower, whys = vision_encoder_shape(config), []
    for make in shapes(set(names)):
        found = ImageSequences(
            model=model, make=make, tower=tower, token=token, names=names, vocabulary=vocabulary
        )
        try:
            ids, beside = found.rows(_ONE_A_ROW)
            model(input_ids=ids, use_cache=False, **beside)
            return found
        except Exception as error:  # whatever a type's own code raises on another type's shape
            whys.append(exception_summary(error, 120))
    raise UnsupportedImages(f"its tower takes none of the known shapes of a picture ({whys[0]})")


def example_images(model: nn.Module, vocabulary: int) -> tuple[torch.Tensor, Batch]:
    """(ids (2, S), what the forward takes beside them): a picture in each row. Raises
    UnsupportedImages."""
    return find_image_sequences(model, vocabulary).rows(_ONE_A_ROW)


@torch.no_grad()
def modules_run_per_image(model: nn.Module, vocabulary: int, stack: str) -> tuple[str, ...]:
    """Modules with parameters, outside the decoder layers at `stack`, that run more often where a
    row holds more pictures. Raises UnsupportedImages."""
    made = find_image_sequences(model, vocabulary)
    few, many = (_runs(made, stack, rows) for rows in (_ONE_A_ROW, ((1, 1), (1,))))
    return tuple(sorted(name for name, count in many.items() if count != few[name]))


def _runs(made: ImageSequences, stack: str, rows: ImageRows) -> Counter[str]:
    ids, beside = made.rows(rows)
    found: Counter[str] = Counter()
    handles = [
        module.register_forward_pre_hook(lambda _, __, name=name: found.update([name]))
        for name, module in made.model.named_modules()
        if not name.startswith(stack + ".")
        and next(module.parameters(recurse=False), None) is not None
    ]
    made.model(input_ids=ids, use_cache=False, **beside)
    for handle in handles:
        handle.remove()
    return found


def forward_input_names(model: nn.Module) -> frozenset[str]:
    """Of what its forward takes; some hand on what they do not name themselves."""
    return frozenset(_taken([type(model).forward, *_all_features(model)]))


def _counts(output: Any) -> Iterator[int]:
    """Features that get_image_features returned: one a placeholder."""
    found = getattr(output, "pooler_output", output)
    if found is None:
        found = output.last_hidden_state
    parts: Sequence[torch.Tensor] = (found,) if isinstance(found, torch.Tensor) else found
    for part in parts:
        yield part.numel() // part.shape[-1]

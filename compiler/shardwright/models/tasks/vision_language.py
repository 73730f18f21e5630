"""Make small images and sequences for a tiny vision-language model, in the format that its forward
takes.

No type is named: the formats are tried one by one on the model's own `get_image_features`. The
    features that come back tell how many tokens of a sequence stand for an image.
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

from shardwright.models.model_files import exception_summary
from shardwright.models.model_skeleton import Batch
from shardwright.models.tiny_config import token_ids

# The formats in which vision encoders take images; the names of a forward's other inputs tell which
# may fit. Letters: N images of all sequences, B sequences, C channels, H and W pixels, P a patch's
# side, T frames of a patch, n patches.


Images = Mapping[str, torch.Tensor]
ImageRows = Sequence[Sequence[int]]
"""Images of each sequence by width: 1 is a square, 2 is half as wide again. A format of fixed size
ignores it."""

_TILES = 5
"""Tiles of an image that is split: the unsplit image and up to four parts."""


class UnsupportedImages(Exception):
    """The model takes images in no known format: one line, the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionEncoderShape:
    """Hold what a configuration says of its images.

    patch: side of a patch (pixels).
    cell: patches on a side that become one token.
    side: side of an image of fixed size (pixels).
    fine_side: side of its copy for a second encoder, 0 where there is none.
    times: factor on the smallest side, for images of free size.
    """

    channels: int
    patch: int
    cell: int
    frames: int
    side: int
    fine_side: int
    times: int = 1


MakeImages = Callable[[VisionEncoderShape, ImageRows], dict[str, torch.Tensor]]


def shapes(names: set[str]) -> Iterator[MakeImages]:
    """Yield the formats that may fit a forward with these inputs, the likeliest first."""
    for key, formats in _BY_KEY.items():
        if key in names:
            for make in formats:
                if "image_merge_sizes" in names:  # only some types take them beside a grid
                    yield partial(_with_merge_sizes, make)
                else:
                    yield make
    extra = names & _SIDES.keys()
    for others in (extra, set()) if extra else (extra,):
        sized: tuple[Any, ...] = (_tiles,) if "image_sizes" in others else ()
        yield from (partial(make, others) for make in (_images, *sized, _images_by_sequence))
    yield _flat_patches


def patches(tower: VisionEncoderShape, inputs: Images) -> int:
    """Count the patches of all images, padding included."""
    count = inputs["pixel_values"].numel() // (tower.channels * tower.patch**2)
    grid = inputs.get("image_grid_thw")
    # A patch of Qwen's repeats each pixel for every frame.
    if grid is not None and count == int(grid.prod()) * tower.frames:
        return count // tower.frames
    return count


def vision_encoder_config(config: Any) -> Any:
    """Return the part of the configuration that describes the vision encoder. Raises
    UnsupportedImages."""
    parts: list[Any] = []
    for name in ("vision_config", "visual_config", "vision_tower_config"):
        encoder = getattr(config, name, None)
        parts.append(encoder)
        parts += [getattr(encoder, name, None) for name in ("sam_config", "encoder_config")]
    parts.append(config)
    part = next((part for part in parts if getattr(part, "patch_size", None) is not None), None)
    if part is None:
        raise UnsupportedImages("its configuration has no tower with a patch size")
    return part


def vision_encoder_shape(config: Any) -> VisionEncoderShape:
    """Read the image sizes of a configuration. Raises UnsupportedImages."""
    part = vision_encoder_config(config)
    patch, cell = first_side(part.patch_size), 0
    for owner in (part, config):
        ratio = getattr(owner, "downsample_ratio", None)
        sizes = (first_side(v) for name in _CELLS if (v := getattr(owner, name, None)))
        cell = cell or next(sizes, 0)
        cell = cell or (round(1 / ratio) if isinstance(ratio, float) and ratio else 0)
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
        cell=cell or 1,
        frames=next((first_side(v) for n in _FRAMES if (v := getattr(part, n, None))), 1),
        side=first_side(getattr(part, "image_size", None)) or patch * 4,
        fine_side=first_side(getattr(fine, "image_size", None)),
    )


_FRAMES = ("temporal_patch_size", "patch_temporal")
_CELLS = (
    "spatial_merge_size",
    "merge_size",
    "pooling_kernel_size",
    "merge_kernel_size",
    "downsample_factor",
)


def first_side(size: Any) -> int:
    """Return a side, the first of (height, width), or 0 where there is none."""
    first = size[0] if isinstance(size, list | tuple) and size else size
    return first if isinstance(first, int) else 0


def _flat(rows: ImageRows) -> list[int]:
    return list(chain.from_iterable(rows))


def _grid(tower: VisionEncoderShape, rows: ImageRows) -> torch.Tensor:
    """Return (N, 2): patches of each image's height and width, for images of free size."""
    return tower.times * torch.tensor(
        [[2 * tower.cell, (1 + width) * tower.cell] for width in _flat(rows)]
    )


def _with_merge_sizes(
    make: MakeImages, tower: VisionEncoderShape, rows: ImageRows
) -> dict[str, torch.Tensor]:
    return make(tower, rows) | {"image_merge_sizes": torch.full((len(_flat(rows)),), tower.cell)}


def _patches(
    key: str, form: str, tower: VisionEncoderShape, rows: ImageRows
) -> dict[str, torch.Tensor]:
    """Return the concatenated patches of all images."""
    grid, c, t, p = _grid(tower, rows), tower.channels, tower.frames, tower.patch
    if form == "token":  # the patches of one token are one large patch
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
    """Return the patches as a strip (1, C, P, n P)."""
    grid = 2 * _grid(tower, rows)
    pixels = torch.randn(1, tower.channels, tower.patch, int(grid.prod(-1).sum()) * tower.patch)
    return {"pixel_values": pixels, "target_sizes": grid.int()}


def _padded(tower: VisionEncoderShape, rows: ImageRows) -> dict[str, torch.Tensor]:
    """Return (N, largest number of patches, C P P) with a mask of the padding."""
    grid = _grid(tower, rows)
    there = torch.arange(int(grid.prod(-1).max())) < grid.prod(-1, keepdim=True)
    pixels = torch.randn(*there.shape, tower.channels * tower.patch**2)
    return {"pixel_values": pixels, "spatial_shapes": grid, "pixel_attention_mask": there.long()}


def _placed(
    patch_of_tokens: bool, tower: VisionEncoderShape, rows: ImageRows
) -> dict[str, torch.Tensor]:
    """Return (N, largest number of patches, C P P), each patch with its column and row.

    patch_of_tokens: whether a patch is as large as a token.
    """
    grid, cell = _grid(tower, rows), tower.cell
    grid, side = (grid // cell, tower.patch * cell) if patch_of_tokens else (grid, tower.patch)
    places = torch.full((len(grid), int(grid.prod(-1).max()), 2), -1)
    for picture, (height, width) in enumerate(grid.tolist()):
        each = torch.cartesian_prod(torch.arange(height), torch.arange(width)).flip(-1)
        places[picture, : height * width] = each
    pixels = torch.rand(*places.shape[:2], tower.channels * side**2)
    return {"pixel_values": pixels, "image_position_ids": places}


def _pooled(tower: VisionEncoderShape, rows: ImageRows) -> dict[str, torch.Tensor]:
    """Return one view per image (N, n, C P P), and for each token its four patches."""
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
    """Return images (N, C, H, W)."""
    count = len(_flat(rows))
    return {"pixel_values": torch.randn(count, tower.channels, tower.side, tower.side)} | _sides(
        extra, tower, (count,)
    )


def _tiles(extra: set[str], tower: VisionEncoderShape, rows: ImageRows) -> dict[str, torch.Tensor]:
    """Return (N, tiles, C, H, W): an image of two by two tiles, or one by two with empty last
    tiles."""
    high = [2 - (width > 1) for width in _flat(rows)]
    pixels = torch.randn(len(high), _TILES, tower.channels, tower.side, tower.side)
    made = {"pixel_values": pixels} | _sides(extra, tower, (len(high),))
    if "image_sizes" in made:
        made["image_sizes"] = torch.tensor([[tower.side * each, tower.side * 2] for each in high])
    return made


def _images_by_sequence(
    extra: set[str], tower: VisionEncoderShape, rows: ImageRows
) -> dict[str, torch.Tensor]:
    """Return (B, largest number of images, C, H, W), zeros where a sequence has fewer."""
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


def _flat_patches(tower: VisionEncoderShape, rows: ImageRows) -> dict[str, torch.Tensor]:
    """Return patches (N, n, C P P)."""
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
"""Inputs beside images of fixed size, by name, for a number of images."""


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


IMAGE_TOKENS = (
    "image_token_id",
    "image_token_index",
    "im_start_id",
    "media_placeholder_token_id",
    "image_token",
)
_PLACES = ("mm_token_type_ids", "token_type_ids")
_MASK = "image_embeds_position_mask"
"""Marks the places of images, for a type without a token for them."""
_ONE_A_ROW: ImageRows = ((1,), (1,))
_TEXT = 12


def image_token(config: Any) -> int | None:
    """Return the id that stands for (a part of) an image in a sequence."""
    return next(
        (v for name in IMAGE_TOKENS if isinstance(v := getattr(config, name, None), int)), None
    )


def image_features(model: nn.Module) -> Callable[..., Any]:
    """Return a function from image inputs to their features; it drops inputs that the model does
    not take. Raises UnsupportedImages."""
    functions = [each for each in _all_features(model) if "pixel_values" in _parameters(each)]
    if not functions:
        raise UnsupportedImages("it has no get_image_features")
    names = _taken(functions)
    return lambda **inputs: functions[0](
        **{name: value for name, value in inputs.items() if name in names}
    )


def _all_features(model: nn.Module) -> Iterator[Callable[..., Any]]:
    """Yield every get_image_features, the outermost first."""
    return (
        features
        for m in model.modules()
        if (features := getattr(m, "get_image_features", None)) is not None
    )


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def _taken(functions: Sequence[Callable[..., Any]]) -> set[str]:
    """Return the names that the first function takes, and those of the next where it passes on
    other keywords."""
    names: set[str] = set()
    for function in functions:
        parameters = _parameters(function).values()
        names |= {p.name for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD}
        if all(p.kind is not inspect.Parameter.VAR_KEYWORD for p in parameters):
            break
    return names


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSequences:
    """Make sequences with images for one tiny model.

    token: the id that stands for an image.
    names: inputs of the model's forward.
    """

    model: nn.Module
    make: MakeImages
    tower: VisionEncoderShape
    token: int
    names: frozenset[str]
    vocabulary: int

    def rows(
        self, rows: ImageRows, length: int | None = None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return (ids (B, S), other inputs): text around the images of each sequence, which start
        at different places.

        length: S; None takes the shortest.
        """
        counts = {width: self.tokens(width) for width in {width for row in rows for width in row}}
        needed = max(sum(counts[width] + 1 for width in row) for row in rows) + _TEXT
        plain = torch.tensor(token_ids(self.model.config).plain)
        ids = plain[torch.randint(len(plain), (len(rows), length or needed))]
        places = torch.zeros_like(ids)
        for number, row in enumerate(rows):
            at = 3 + number % 2
            for width in row:
                places[number, at : at + counts[width]] = 1
                at += counts[width] + 1  # a word between two images
        ids[places.bool()] = self.token
        beside = self.make(self.tower, rows) if any(rows) else {}
        beside |= {name: places for name in _PLACES if name in self.names}
        if _MASK in self.names:
            beside[_MASK] = places.bool()
        return ids, beside

    @torch.no_grad()
    def tokens(self, width: int) -> int:
        """Return the tokens that stand for an image of this width."""
        return feature_count(image_features(self.model)(**self.make(self.tower, [[width]])))


@torch.no_grad()
def find_image_sequences(model: nn.Module, vocabulary: int) -> ImageSequences:
    """Return the first format that the model accepts. Raises UnsupportedImages."""
    config: Any = model.config
    names = forward_input_names(model)
    token = token_ids(config).plain[0] if _MASK in names else image_token(config)
    if token is None:
        raise UnsupportedImages("its configuration names no token that stands for a picture")
    tower, whys = vision_encoder_shape(config), []
    for make in shapes(set(names)):
        sequences = ImageSequences(
            model=model, make=make, tower=tower, token=token, names=names, vocabulary=vocabulary
        )
        try:
            ids, beside = sequences.rows(_ONE_A_ROW)
            model(input_ids=ids, use_cache=False, **beside)
            return sequences
        except Exception as error:  # a type's code may raise anything on another type's format
            whys.append(exception_summary(error, 120))
    raise UnsupportedImages(f"its tower takes none of the known shapes of a picture ({whys[0]})")


def example_images(model: nn.Module, vocabulary: int) -> tuple[torch.Tensor, Batch]:
    """Return (ids (2, S), other inputs) with an image in each sequence. Raises
    UnsupportedImages."""
    return find_image_sequences(model, vocabulary).rows(_ONE_A_ROW)


@torch.no_grad()
def modules_run_per_image(model: nn.Module, vocabulary: int, stack: str) -> tuple[str, ...]:
    """Return the modules outside the decoder layers at `stack` that run more often for more images.
    Raises UnsupportedImages."""
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
    """Return the inputs of the model's forward, including those that it passes on by keyword."""
    return frozenset(_taken([type(model).forward, *_all_features(model)]))


def feature_count(output: Any) -> int:
    """Count the features that get_image_features returned: one a placeholder token."""
    features = getattr(output, "pooler_output", output)
    if features is None:
        features = output.last_hidden_state
    if isinstance(features, torch.Tensor):
        return features.numel() // features.shape[-1]
    return sum(map(feature_count, features))

"""Small pictures for a tiny copy of a model that sees, in the shapes that its forward takes.

No type is named: the shapes (models/tasks/image_formats.py) are tried one by one on the model's own
`get_image_features`, and the rows that come back say how many tokens of a row stand for a picture.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwright.models.model_skeleton import Batch
from shardwright.models.special_token_ids import token_ids
from shardwright.models.tasks.image_formats import (
    ImageRows,
    MakeImages,
    UnsupportedImages,
    VisionEncoderShape,
    shapes,
    vision_encoder_config,
    vision_encoder_shape,
)
from shardwright.utils.exception_summary import exception_summary

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

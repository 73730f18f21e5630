"""Run the vision encoder on a dummy image where no sequence of a micro-batch holds one.

Its features are sliced to none. Without it, a data rank's ZeRO collectives would differ from its
neighbours'. The model's own forward runs the encoder, so each weight is gathered and reduced in the
same order as theirs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardwright.models.model_skeleton import Batch


class DummyImage:
    """Provide the dummy image of `model` or of one stage of it."""

    def __init__(self, model: nn.Module) -> None:
        having: list[Any] = [
            m
            for m in model.modules()
            if _names(getattr(m, "get_image_features", None)) >= {"pixel_values"}
        ]
        self._owner = having[-1]  # outer modules call the inner one

    @contextmanager
    def shown(self, inputs: Batch | None) -> Iterator[Batch]:
        """Yield the image inputs of one forward.

        inputs: the dummy image's, on the model's device; None where sequences hold images
        """
        if inputs is None:
            yield {}
            return
        features, blank = self._owner.get_image_features, inputs
        taken = {name: value for name, value in blank.items() if name in _names(features)}

        def no_features(*_: Any, **given: Any) -> Any:
            options = {
                name: value for name, value in given.items() if not isinstance(value, torch.Tensor)
            }
            return _without_rows(features(**{**options, **taken}))

        self._owner.get_image_features = no_features
        try:
            # Grids are dropped, because a forward expects an image in the ids for each.
            yield {name: value for name, value in blank.items() if value.is_floating_point()}
        finally:
            del self._owner.get_image_features


def _names(function: Callable[..., Any] | None) -> frozenset[str]:
    return frozenset() if function is None else frozenset(inspect.signature(function).parameters)


def _without_rows(features: Any) -> Any:
    """Return the features without rows; the encoder's gradients are then zero."""
    if isinstance(features, torch.Tensor):
        return features[:0]
    if isinstance(features, dict):
        for name, value in features.items():
            features[name] = _without_rows(value)
        return features
    return (
        type(features)(_without_rows(each) for each in features)
        if isinstance(features, tuple | list)
        else features
    )


def inputs_on_device(
    inputs: Batch | None, device: torch.device, dtype: torch.dtype
) -> Batch | None:
    """Move image inputs to the device and the compute dtype."""
    if inputs is None:
        return None
    return {n: v.to(device, dtype if v.is_floating_point() else v.dtype) for n, v in inputs.items()}

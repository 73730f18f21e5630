"""The tower runs in every micro-batch: where no row holds a picture, on a blank one whose features count for nothing.

A data rank without a picture would leave ZeRO's collectives with other sizes than its neighbours have.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardwright.hf.skeleton import Batch


class BlankPicture:
    """A hook on the input embedding of `model`, which every forward passes once."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._inputs: Batch | None = None
        table: Any = self._model.get_input_embeddings()
        table.register_forward_hook(self._add)

    @contextmanager
    def shown(self, inputs: Batch | None) -> Iterator[None]:
        """For one forward. inputs: of the blank picture, on the model's device; None where its rows hold pictures."""
        self._inputs = inputs
        try:
            yield
        finally:
            self._inputs = None

    def _add(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        if self._inputs is None:
            return output
        given, self._inputs = self._inputs, None
        features = self._model.get_image_features(**given)
        return output + 0 * _sum(features).to(output)


OF_THE_TOWER_ALONE = frozenset({"last_hidden_state", "hidden_states", "attentions"})
"""Fields of what a model says of a picture that its decoder does not take."""


def _sum(features: Any) -> torch.Tensor:
    """Of all that goes to the decoder, what is added behind its first layers (deepstack) included: what makes it has
    gradients on every rank."""
    if isinstance(features, torch.Tensor):
        return features.sum()
    if isinstance(features, dict):
        features = [value for name, value in features.items() if name not in OF_THE_TOWER_ALONE]
    return torch.stack([_sum(f) for f in features]).sum()


def on_device(inputs: Batch | None, device: torch.device, dtype: torch.dtype) -> Batch | None:
    """Pictures' values in the compute dtype, as the model's weights are."""
    if inputs is None:
        return None
    return {n: v.to(device, dtype if v.is_floating_point() else v.dtype) for n, v in inputs.items()}

"""The optimizers that layouts are compared on, each in one plain process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tests.parity import adafactor, adamw_8bit, lion, muon
from tests.parity.plain_training import Update

PLAIN_OPTIMIZERS: Mapping[str, tuple[dict[str, Any], Callable[[Any], Update]]] = {
    "muon": (muon.OPTIMIZER, muon.muon_update),
    "adamw_8bit": (adamw_8bit.OPTIMIZER, adamw_8bit.adamw_8bit_update),
    "lion": (lion.OPTIMIZER, lion.LionUpdate),
    "adafactor": (adafactor.OPTIMIZER, adafactor.adafactor_update),
    "adafactor-unscaled": (adafactor.UNSCALED, adafactor.unscaled_update),
}
"""Maps an optimizer to its section of the recipe, and to what makes a model's update."""

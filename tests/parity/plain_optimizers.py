"""The optimizers that layouts are compared on, each in one plain process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shardwright.utils.numeric_difference import largest_difference
from tests.parity import adafactor, adamw_8bit, lion, muon
from tests.parity.harness import LOSS_ABSOLUTE
from tests.parity.plain_training import Update

PLAIN_OPTIMIZERS: Mapping[str, tuple[dict[str, Any], Callable[[Any], Update]]] = {
    "muon": (muon.OPTIMIZER, muon.muon_update),
    "adamw_8bit": (adamw_8bit.OPTIMIZER, adamw_8bit.adamw_8bit_update),
    "lion": (lion.OPTIMIZER, lion.LionUpdate),
    "adafactor": (adafactor.OPTIMIZER, adafactor.adafactor_update),
    "adafactor-unscaled": (adafactor.UNSCALED, adafactor.unscaled_update),
}
"""Maps an optimizer to its section of the recipe, and to what makes a model's update."""

NORM_RELATIVE, WEIGHT_ABSOLUTE = 1e-4, 1e-5


def assert_as_one_process(found: Mapping[str, Mapping[str, float]]) -> None:
    """found: the worker's figures of each case, in fp32."""
    assert largest_difference(line["loss"] for line in found.values()) <= LOSS_ABSOLUTE, found
    assert largest_difference(line["norm"] for line in found.values()) <= NORM_RELATIVE, found
    assert largest_difference(line["weight"] for line in found.values()) <= WEIGHT_ABSOLUTE, found
    assert all(line["exported"] == 0 for line in found.values()), found

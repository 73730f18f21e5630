"""Define the keys of `training.optimizer` that only some optimizers take, and their defaults."""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.utils.json_values import JsonObject, JsonValue

OPTIMIZER_DEFAULTS: Mapping[str, JsonObject] = {
    "muon": {"lr": 0.02, "momentum": 0.95, "ns_steps": 5, "adamw_lr": 3e-4},
}
"""Maps an optimizer to the defaults of its own keys, and to those that differ from the schema's."""

MUON_KEYS = ("momentum", "ns_steps", "adamw_lr")


def with_optimizer_defaults(document: JsonObject) -> JsonObject:
    """Fill in what the chosen optimizer has defaults of its own for, in a recipe as written."""
    training = document.get("training")
    section = training.get("optimizer") if isinstance(training, Mapping) else None
    name = section.get("name") if isinstance(section, Mapping) else None
    defaults = OPTIMIZER_DEFAULTS.get(name) if isinstance(name, str) else None
    if defaults is None or not isinstance(training, Mapping) or not isinstance(section, Mapping):
        return document
    given = {key: value for key, value in section.items() if value is not None}
    return {**document, "training": {**training, "optimizer": {**section, **defaults, **given}}}


def without_optimizer_defaults(training: JsonObject) -> JsonObject:
    """Drop keys that the optimizer does not take: older recipes lack them, and have one hash."""
    section = training["optimizer"]
    assert isinstance(section, Mapping)
    left: dict[str, JsonValue] = {
        key: value for key, value in section.items() if key not in MUON_KEYS or value is not None
    }
    return {**training, "optimizer": left}

"""Define the keys of `training.optimizer` that only some optimizers take, and their defaults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shardwright.diagnostics import Diagnostic, found
from shardwright.recipe.recipe_schema import join_with_or
from shardwright.utils.json_values import JsonObject

SECTION = "training.optimizer"
OPTIMIZER_KEYS: Mapping[str, tuple[str, ...]] = {
    "adamw": ("betas", "eps"),
    "muon": ("betas", "eps", "momentum", "ns_steps", "adamw_lr"),
    "adamw_8bit": ("betas", "eps"),
    "lion": ("betas",),
    "adafactor": ("eps", "beta2_decay", "clip_threshold", "scale_parameter", "scale_eps"),
}
"""Maps an optimizer to the keys that it takes beside name, lr and weight_decay."""

OPTIMIZER_DEFAULTS: Mapping[str, JsonObject] = {
    "muon": {"lr": 0.02, "momentum": 0.95, "ns_steps": 5, "adamw_lr": 3e-4},
    "lion": {"lr": 1e-4, "betas": [0.9, 0.99]},
    "adafactor": {
        "lr": 1e-2,
        "eps": 1.1920929e-07,  # torch's default, of fp32
        "beta2_decay": -0.8,
        "clip_threshold": 1.0,
        "scale_parameter": True,
        "scale_eps": 1e-3,
    },
}
"""Maps an optimizer to the defaults of its own keys, and to those that differ from the schema's."""


def keys_without_effect(optimizer: str) -> tuple[str, ...]:
    """Return the keys that other optimizers take and this one does not."""
    every = dict.fromkeys(key for keys in OPTIMIZER_KEYS.values() for key in keys)
    return tuple(key for key in every if key not in OPTIMIZER_KEYS[optimizer])


def optimizer_key_errors(document: JsonObject) -> Iterator[Diagnostic]:
    """Yield SW1226 for each key of a recipe, as written, that its optimizer does not take."""
    section = _section(document)
    name = section.get("name") or "adamw"
    if not isinstance(name, str) or name not in OPTIMIZER_KEYS:
        return
    for key in keys_without_effect(name):
        if section.get(key) is not None:
            owner = join_with_or([each for each, keys in OPTIMIZER_KEYS.items() if key in keys])
            message = f"{SECTION}.{key} has no effect with the optimizer {name}"
            help = f"Remove it, or write `name: {owner}`."
            yield found("SW1226", f"{SECTION}.{key}", message, help)


def with_optimizer_defaults(document: JsonObject) -> JsonObject:
    """Fill in what the chosen optimizer has defaults of its own for, in a recipe as written."""
    training, section = document.get("training"), _section(document)
    name = section.get("name")
    defaults = OPTIMIZER_DEFAULTS.get(name) if isinstance(name, str) else None
    if defaults is None or not isinstance(training, Mapping):
        return document
    given = {key: value for key, value in section.items() if value is not None}
    return {**document, "training": {**training, "optimizer": {**section, **defaults, **given}}}


def _section(document: JsonObject) -> JsonObject:
    training = document.get("training")
    section = training.get("optimizer") if isinstance(training, Mapping) else None
    return section if isinstance(section, Mapping) else {}


def without_other_optimizers_keys(training: JsonObject) -> JsonObject:
    """Drop the keys that the optimizer does not take; some have a default that is not null."""
    section = training["optimizer"]
    assert isinstance(section, Mapping)
    absent = keys_without_effect(str(section["name"]))
    left = {key: value for key, value in section.items() if key not in absent}
    return {**training, "optimizer": left}

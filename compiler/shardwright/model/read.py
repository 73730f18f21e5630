"""The recipe's `model` section -> the configuration as written. No torch and no transformers here: what needs them
(is the type known? does it run on code of its own?) waits until a graph is traced."""

from __future__ import annotations

from pathlib import Path

from shardwright.ir.json_value import JsonObject
from shardwright.ir.recipe import ModelSection
from shardwright.model.popular.hub import hub_config, read_config_file


def read_config(section: ModelSection) -> tuple[JsonObject, bool]:
    """The configuration, and whether it stands in the recipe itself.

    Errors: SW2002 no readable config.json; those of hub_config for a hub id.
    """
    if section.config is not None:
        return section.config, True
    source = section.source or ""
    folder = Path(source)
    config = read_config_file(folder / "config.json") if folder.is_absolute() else hub_config(source, section.revision)
    return config, False

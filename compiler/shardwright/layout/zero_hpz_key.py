"""The key of hpZ, a second copy of ZeRO-3's weights inside each node: the layout decides it, a
recipe can say no."""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.utils.json_types import JsonObject

HPZ = "zero_hpz_partition_size"
"""In DeepSpeed's zero_optimization section: ranks that share one copy; 1 for none."""


def disables_hpz(extra: JsonObject) -> bool:
    """Of a recipe's `extra`."""
    section = extra.get("zero_optimization")
    return isinstance(section, Mapping) and section.get(HPZ) == 1

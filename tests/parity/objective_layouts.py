"""Compare each objective with a plain loop: eight kinds of layouts of two model types, eight of
adapters, and checkpoints that another layout resumes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwright.utils.numeric_difference import largest_difference
from tests.parity.case_launches import launched
from tests.parity.harness import LOSS_ABSOLUTE, NORM_RELATIVE

LIMITS = {
    "loss": LOSS_ABSOLUTE,
    "held out": LOSS_ABSOLUTE,
    "norm": NORM_RELATIVE,
    "weight": 1e-5,
    "metrics": 1e-5,
}
"""Difference from the plain loop -> the most that it may be."""
Fields = dict[str, Any]
TYPES = ("llama", "gpt2")
OVER_TWO: dict[str, Fields] = {
    "zero0": {"data": 2, "zero_stage": 0},
    "zero2": {"data": 2, "zero_stage": 2, "checkpointing": "full"},
    "zero3": {"data": 2, "zero_stage": 3},
    "tp2": {"tensor": 2},
    "pp2": {"pipeline": 2},
    "context2": {"context": 2},
}
OVER_FOUR: dict[str, Fields] = {
    "tp2-pp2": {"tensor": 2, "pipeline": 2, "checkpointing": "full"},
    "dualpipev": {"data": 2, "pipeline": 2, "schedule": "dualpipev", "accumulation": 4},
}
RESUMED: dict[str, Fields] = {"llama": {"pipeline": 2}, "gpt2": {"tensor": 2}}
"""Type -> the layout that goes on from a checkpoint of ZeRO-1."""
ADAPTED: dict[str, Fields] = {
    "lora-zero0": {"zero_stage": 0},
    "lora-zero1": {"zero_stage": 1},
    "lora-zero2": {"zero_stage": 2},
    "lora-zero3": {"zero_stage": 3},
    "lora-zero1-recomputed": {"zero_stage": 1, "checkpointing": "full"},
    "lora-zero3-recomputed": {"zero_stage": 3, "checkpointing": "full"},
    "lora-zero2-chunked": {"zero_stage": 2, "loss": "chunked"},
    "lora-zero3-chunked": {"zero_stage": 3, "loss": "chunked"},
}
"""Adapters train over data ranks alone (SW1432, SW1433)."""


def over_two_ranks(*, lora: bool = True) -> dict[str, Fields]:
    """Return the fields of each case of two ranks."""
    plain = {
        f"{model}-{name}": {"model": model, **f} for model in TYPES for name, f in OVER_TWO.items()
    }
    resumed = {f"{m}-resumed": {"model": m, "resumed": True, **f} for m, f in RESUMED.items()}
    adapted = {
        f"{model}-{name}": {"model": model, "data": 2, "lora_rank": 4, **fields}
        for model in TYPES
        for name, fields in ADAPTED.items()
    }
    return {**plain, **resumed, **(adapted if lora else {})}


def over_four_ranks() -> dict[str, Fields]:
    """Return the fields of each case of four ranks."""
    return {
        f"{model}-{name}": {
            "model": f"{model}-deep" if "schedule" in fields else model,
            **fields,
        }
        for model in TYPES
        for name, fields in OVER_FOUR.items()
    }


def check(
    cases: Mapping[str, Any], folder: Path, worker: str, **limits: float
) -> dict[str, dict[str, Any]]:
    """Train the cases in one launch of a worker, and assert their largest differences. Returns
    the figures of each case.

    limits: of what the worker measures beside LIMITS
    """
    found = launched(cases, folder, worker)
    largest = {
        name: largest_difference(line[name] for line in found.values())
        for name in next(iter(found.values()))
    }
    print(largest)
    for name, limit in {**LIMITS, **limits}.items():
        assert largest[name] <= limit, (name, found)
    return found

"""Keys of `extra` that an engine does not stand, found by trying (tests/launch/test_extra.py)."""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.diagnostics import Diagnostic
from shardwright.ir.json_value import JsonValue
from shardwright.rules.layout import Candidate, found

_TIMERS = "DeepSpeed's pipeline engine starts the timers of the backward pass twice, and fails"
IN_A_PIPELINE = {"wall_clock_breakdown": _TIMERS, "flops_profiler": _TIMERS}
"""Key -> why a pipeline does not run with it."""


def no_pipeline(x: Candidate) -> Diagnostic | None:
    """Measured: DeepSpeed ends in the first backward pass (runtime/pipe/engine.py, _exec_backward_pass, and the hook of
    runtime/engine.py behind it start the same timer)."""
    if x.strategy.pipeline == 1:
        return None
    key = next((key for key in IN_A_PIPELINE if _is_on(x.recipe.extra.get(key))), None)
    if key is None:
        return None
    return found(
        "SW3133",
        f"extra.{key}",
        f"extra.{key} does not run at pipeline {x.strategy.pipeline}: {IN_A_PIPELINE[key]}",
        "Remove it, or write `pipeline: 1`. run/metrics.jsonl has every step's seconds.",
    )


def _is_on(value: JsonValue) -> bool:
    return bool(value.get("enabled") if isinstance(value, Mapping) else value)

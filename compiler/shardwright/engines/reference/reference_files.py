"""The reference engine's files: engines.engine.Lowering. It reads nothing but the plan."""

from __future__ import annotations

from shardwright.diagnostics import Diagnostic
from shardwright.plan.plan import Plan
from shardwright.utils.json_types import JsonObject
from shardwright.utils.template_rendering import render_template


def zero_settings(plan: Plan) -> JsonObject:
    return {"stage": 0}


def files(plan: Plan, config: JsonObject) -> tuple[dict[str, bytes], tuple[Diagnostic, ...]]:
    script = render_template("launch/process_train.py.j2", plan=plan)
    return {"train.py": script.encode("utf-8")}, ()

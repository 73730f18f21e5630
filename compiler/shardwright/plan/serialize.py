"""plan.json <-> Plan. Reading is strict: an unknown or missing key is an error."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from shardwright.plan.plan import Plan


def plan_to_json(plan: Plan) -> str:
    """The text of plan.json: field order, one-space indent, a final newline."""
    return json.dumps(dataclasses.asdict(plan), indent=1, ensure_ascii=False) + "\n"


def plan_from_json(text: str) -> Plan:
    """Raises ValueError (pydantic's ValidationError is one) where the text is no plan."""
    from pydantic import TypeAdapter

    plan = TypeAdapter(Plan).validate_json(text)
    plan.verify()
    return plan


def read_plan(folder: Path) -> Plan:
    return plan_from_json((folder / "plan.json").read_text(encoding="utf-8"))

"""plan.json <-> Plan. Reading is strict: an unknown or missing key is an error."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from shardwright.diagnostics import refusal
from shardwright.plan.plan import Plan
from shardwright.utils.bounded_read import parse_json
from shardwright.utils.json_records import read_record


def plan_to_json(plan: Plan) -> str:
    """The text of plan.json: one-space indent, a final newline."""
    return json.dumps(plan_document(plan), indent=1, ensure_ascii=False) + "\n"


def plan_document(plan: Plan) -> dict[str, Any]:
    """What plan.json holds, in field order. A rank's place among context ranks stands where there
    are several, the modules of experts where ranks share them out, `kernels` where they are not
    Hugging Face's, `transformer_engine` where ranks may take its layers, and a balance loss, frozen
    parameters, a task beside causal-lm, islands, a noise scale and what is said of pictures where
    there is one."""
    document = dataclasses.asdict(plan)
    if plan.strategy.context == 1:
        for rank in document["ranks"]:
            del rank["context"]
    if not plan.experts:
        del document["experts"]
    if plan.model.kernels == "hf":
        del document["model"]["kernels"]
    if plan.model.router_aux_loss is None:
        del document["model"]["router_aux_loss"]
    if not plan.model.is_vision_language:
        del document["model"]["task"], document["model"]["vision_encoder_blocks"]
    if plan.model.transformer_engine == "off":
        del document["model"]["transformer_engine"]
    if not plan.model.frozen:
        del document["model"]["frozen"]
    if plan.outer is None:
        del (
            document["outer"],
            document["launch"]["outer_store"],
            document["predicted"]["time"]["outer_comm_seconds"],
        )
    if plan.tracking is not None and plan.tracking.noise_scale is None:
        del document["tracking"]["noise_scale"]
    _leave_out_defaults(document["data"])
    if plan.validation is not None and plan.validation.data is not None:
        _leave_out_defaults(document["validation"]["data"])
    return document


def _leave_out_defaults(data: dict[str, Any]) -> None:
    if data["add_bos_token"] == "auto":
        del data["add_bos_token"]
    if data["images"] is None:
        del data["images"]
        if not data["skip_damaged"]:
            del data["skip_damaged"]
    else:
        data["images"] = images_without_defaults(data["images"])
    for part in data["mixture"]:
        _leave_out_defaults(part)


def images_without_defaults(images: dict[str, Any]) -> dict[str, Any]:
    """Without what is not said: as it was written before it could be."""
    return {
        name: value
        for name, value in images.items()
        if (name, value) not in (("tiles", True), ("folder", None))
    }


def plan_from_json(text: str) -> Plan:
    """Raises ValueError where the text is no plan."""
    plan = read_record(Plan, parse_json(text))
    plan.verify()
    return plan


def read_plan(folder: Path) -> Plan:
    return plan_from_json((folder / "plan.json").read_text(encoding="utf-8"))


def load_plan(folder: Path) -> Plan:
    """Raises Refusal where `folder` is not a compiled folder of this version."""
    try:
        return read_plan(folder)
    except (OSError, ValueError) as error:
        why = "it has no plan.json" if isinstance(error, OSError) else str(error).splitlines()[0]
        message = f"{str(folder)!r} is not a compiled folder: {why}"
        raise refusal(
            "SW6001", message, "Make one with `shardwright compile RECIPE -o DIR`."
        ) from None

"""Writes models/support.json, models/vlm_support.json and the two tables of tensor parallelism from
what `make prove` found in the pieces zoo-*, of each the newest run under build/prove/.

A column whose piece has no run stays as it is. A type that a run does not name is untested there;
one that ended in an error or differed is not verified.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
)

from tests.zoo.configs import RUNNABLE, base_type
from tests.zoo.overrides import IMPOSSIBLE
from tools.prove.proof_results import newest_cases

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "compiler" / "shardwright" / "models" / "support.json"
VLM_SUPPORT = SUPPORT.with_name("vlm_support.json")
TENSOR_VERIFIED = SUPPORT.with_name("tensor_verified.json")
TENSOR_UNSPLIT = SUPPORT.with_name("tensor_unsplit.json")

Cases = dict[str, dict[str, Any]]
Found = Mapping[str, tuple[str, Cases]]
"""Area of a piece -> (date, type -> case)."""

# column -> (area, the recipe's parallelism keys that it was measured with)
COLUMNS: dict[str, tuple[str, str]] = {
    "zero": ("zoo-zero", "data=2 zero_stage=2"),
    "pipeline": ("zoo-pipeline", "pipeline=2 zero_stage=1"),
    "tensor_sharded": ("zoo-tensor", "tensor=2 zero_stage=1"),
    "tensor_fallback": ("zoo-tensor-fallback", "tensor=2 zero_stage=1"),
    "pipeline_tensor": ("zoo-pipeline-tensor", "pipeline=2 tensor=2 zero_stage=1"),
    "expert": ("zoo-expert", "data=2 expert=2 zero_stage=1"),
    "context": ("zoo-context", "context=2 zero_stage=1"),
}
VLM_COLUMNS: dict[str, tuple[str, str]] = {
    "layer_split": ("zoo-vlm", "an image in each sequence"),
    "pipeline": ("zoo-vlm-pipeline", "pipeline=2 zero_stage=1"),
    "zero": ("zoo-vlm-zero", "data=2 zero_stage=3"),
}
FIGURES = ("loss", "norm", "weights", "sharded")
LEAST_SHARDED = 0.95
"""A type counts as sharded where each of two ranks holds a part of at least this share of the
layers' matrices."""


def compose(found: Found, committed: dict[str, Any]) -> dict[str, Any]:
    """The whole document of support.json. committed: the one that is there."""
    two_parts = _two_parts()
    others = sorted(set(CONFIG_MAPPING_NAMES) - set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    return {
        **_table(COLUMNS, sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), found, committed),
        "decoders": sorted(two_parts & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)),
        "others": {t: "encoder-decoder" if t in two_parts else "" for t in others},
    }


def compose_vlm(found: Found, committed: dict[str, Any]) -> dict[str, Any]:
    """The whole document of vlm_support.json."""
    types = sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    return {**_table(VLM_COLUMNS, types, found, committed), "decoders": [], "others": {}}


def _table(
    columns: dict[str, tuple[str, str]], types: list[str], found: Found, committed: dict[str, Any]
) -> dict[str, Any]:
    said = {}
    cells: dict[str, dict[str, Any]] = {t: {} for t in types}
    for column, (area, layout) in columns.items():
        date, cases = found.get(area, (committed["columns"][column]["date"], None))
        said[column] = {"area": area, "layout": layout, "date": date}
        for t in types:
            kept = committed["types"].get(t, {}).get(column)
            if cases is None and kept is not None:
                cells[t][column] = kept
            else:
                cells[t][column] = _cell(column, t, (cases or {}).get(t))
    return {
        "transformers": metadata.version("transformers"),
        "columns": said,
        "types": cells,
    }


def tensor_tables(planned: Cases, gathered: Cases) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """tensor_verified.json (type -> "sharded", "fallback" or {"refused": why}) and
    tensor_unsplit.json (sharded type -> its parameters that every rank holds unsharded)."""
    verified: dict[str, Any] = {}
    unsplit: dict[str, list[str]] = {}
    for t in RUNNABLE:
        shapes = [
            case for s, case in planned.items() if base_type(s) == t and case["verdict"] == "proved"
        ]
        if shapes:
            verified[t] = "sharded"
            unsplit[t] = sorted({name for case in shapes for name in case["whole"]})
        elif gathered[t]["verdict"] == "proved":
            verified[t] = "fallback"
        else:
            verified[t] = {"refused": gathered[t]["reason"]}
    return verified, unsplit


def _cell(column: str, model_type: str, case: dict[str, Any] | None) -> dict[str, Any]:
    if case is None:
        reason = IMPOSSIBLE.get(model_type, "no run of it under this layout")
        return {"verdict": "untested", "reason": reason}
    figures = {name: float(f"{case[name]:.2g}") for name in FIGURES if case.get(name) is not None}
    if case["verdict"] == "refused":
        return {"verdict": "refused", "code": case["refused"], "reason": case["reason"]}
    if case["verdict"] == "proved":
        if column == "tensor_sharded" and case["sharded"] < LEAST_SHARDED:
            return {
                "verdict": "untested",
                "reason": f"only {case['sharded']:.0%} of its layers is cut",
                **figures,
            }
        return {"verdict": "verified", **figures}
    reasons = {"error": "its run ended in an error", "wrong": "its run differed from the plain one"}
    reason = case.get("reason") or reasons[case["verdict"]]
    return {"verdict": "untested", "reason": reason, **figures}


def _two_parts() -> set[str]:
    """Encoder-decoders: not the models that put an audio encoder before a decoder-only language
    model."""
    sequence = {
        *MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        *MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    }
    return {t for t in sequence if CONFIG_MAPPING[t]().is_encoder_decoder}


def text(document: dict[str, Any]) -> str:
    """One line a type, so that a difference reads as what changed."""
    types = ",\n".join(
        f"  {json.dumps(t)}: {json.dumps(cells)}" for t, cells in document["types"].items()
    )
    head = json.dumps({k: document[k] for k in ("transformers", "columns")}, indent=1)[:-2]
    decoders, others = json.dumps(document["decoders"]), json.dumps(document["others"], indent=1)
    return (
        f'{head},\n "types": {{\n{types}\n }},\n "decoders": {decoders},\n "others": {others}\n}}\n'
    )


def _found(*tables: dict[str, tuple[str, str]]) -> Found:
    areas = [area for table in tables for area, _ in table.values()]
    return {area: cases for area in areas if (cases := newest_cases(area)) is not None}


def main() -> None:
    found = _found(COLUMNS, VLM_COLUMNS)
    for path, composed in ((SUPPORT, compose), (VLM_SUPPORT, compose_vlm)):
        committed = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(text(composed(found, committed)), encoding="utf-8")
        print(path)
    if {"zoo-tensor", "zoo-tensor-fallback"} <= found.keys():
        tables = tensor_tables(found["zoo-tensor"][1], found["zoo-tensor-fallback"][1])
        for path, table in zip((TENSOR_VERIFIED, TENSOR_UNSPLIT), tables, strict=True):
            path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
            print(path)


if __name__ == "__main__":
    main()

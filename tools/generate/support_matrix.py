"""Writes models/support.json and models/vlm_support.json from what `make prove` measured.

A type that a benchmark does not name is untested there; one that ended in an error or differed is
not proved.
"""

from __future__ import annotations

import json
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

from tests.zoo.overrides import IMPOSSIBLE

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
SUPPORT = ROOT / "compiler" / "shardwright" / "models" / "support.json"
VLM_SUPPORT = SUPPORT.with_name("vlm_support.json")

# column -> (benchmark, the recipe's parallelism keys that it was measured with)
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


def compose(benchmarks: Path = BENCHMARKS) -> dict[str, Any]:
    """The whole document of support.json."""
    measured, columns = _measured(COLUMNS, benchmarks)
    two_parts = _two_parts()
    others = sorted(set(CONFIG_MAPPING_NAMES) - set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    return {
        "transformers": metadata.version("transformers"),
        "columns": columns,
        "types": {
            t: {column: _cell(column, t, cases.get(t)) for column, cases in measured.items()}
            for t in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
        },
        "decoders": sorted(two_parts & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)),
        "others": {t: "encoder-decoder" if t in two_parts else "" for t in others},
    }


def compose_vlm(benchmarks: Path = BENCHMARKS) -> dict[str, Any]:
    """The whole document of vlm_support.json."""
    measured, columns = _measured(VLM_COLUMNS, benchmarks)
    return {
        "transformers": metadata.version("transformers"),
        "columns": columns,
        "types": {
            t: {column: _vlm_cell(cases.get(t)) for column, cases in measured.items()}
            for t in sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
        },
        "decoders": [],
        "others": {},
    }


def _measured(
    wanted: dict[str, tuple[str, str]], benchmarks: Path
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, str]]]:
    """(column -> type -> case, column -> what is said of it)"""
    measured: dict[str, dict[str, Any]] = {}
    columns: dict[str, dict[str, str]] = {}
    for column, (name, layout) in wanted.items():
        path = benchmarks / f"{name}.json"
        document: dict[str, Any] = {"cases": {}, "date": ""}
        if path.exists():
            document = json.loads(path.read_text())
        measured[column] = document["cases"]
        columns[column] = {"benchmark": name, "layout": layout, "date": document["date"]}
    return measured, columns


def _vlm_cell(case: dict[str, Any] | None) -> dict[str, Any]:
    if case is None:
        return {"verdict": "untested", "reason": "no run of it under this layout"}
    figures = {name: float(f"{case[name]:.2g}") for name in FIGURES if case.get(name) is not None}
    if case["verdict"] == "proved":
        return {"verdict": "verified", **figures}
    verdict = "refused" if case["verdict"] == "refused" else "untested"
    return {
        "verdict": verdict,
        "code": case.get("refused") or "",
        "reason": case.get("reason") or case["verdict"],
    }


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
    return {"verdict": "untested", "reason": reasons[case["verdict"]], **figures}


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


if __name__ == "__main__":
    for path, document in ((SUPPORT, compose()), (VLM_SUPPORT, compose_vlm())):
        path.write_text(text(document), encoding="utf-8")
        print(path)

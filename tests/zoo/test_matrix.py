"""The support matrix is what runs found, for every causal-LM type of the installed transformers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from shardwright.diagnostics.code_registry import CODES
from shardwright.models import model_support
from tests.zoo.configs import RUNNABLE
from tools.generate import support_matrix as matrix

EMPTY: dict[str, Any] = {
    "columns": {c: {"date": ""} for c in (*matrix.COLUMNS, *matrix.VLM_COLUMNS)},
    "types": {},
}
DATE = "2026-01-02"


def committed(task: str = "text") -> dict[str, Any]:
    text = {
        "text": model_support.support_text(),
        "vlm": model_support.support_text("image-text-to-text"),
    }
    return dict(json.loads(text[task]))


def test_without_a_run_the_tables_stay_as_they_are() -> None:
    for task, compose in (("text", matrix.compose), ("vlm", matrix.compose_vlm)):
        document = compose({}, committed(task))
        assert document == committed(task), "python -m tools.generate support_matrix"
        assert json.loads(matrix.text(document)) == document


def test_a_new_type_is_untested_until_a_run_names_it() -> None:
    before = committed()
    del before["types"]["llama"]
    cells = matrix.compose({}, before)["types"]["llama"]
    assert {cell["verdict"] for cell in cells.values()} == {"untested"}


def test_what_the_zoo_says_of_types_that_see() -> None:
    cases: dict[str, dict[str, Any]] = {
        "llava": {"verdict": "proved", "loss": 1.234e-6, "norm": 1e-7, "weights": 1e-8},
        "udop": {
            "verdict": "refused",
            "refused": "SW2017",
            "reason": "an encoder-decoder",
            "why": "it is",
        },
        "fuyu": {"verdict": "not proved", "reason": "no tower"},
    }
    document = matrix.compose_vlm({"zoo-vlm-zero": (DATE, cases)}, EMPTY)
    assert (
        document["columns"]["zero"]["date"] == DATE
        and set(document["types"]) == model_support.vision_language_types()
    )
    found = {t: document["types"][t]["zero"] for t in cases}
    assert found["llava"] == {"verdict": "verified", "loss": 1.2e-6, "norm": 1e-7, "weights": 1e-8}
    assert found["udop"] == {"verdict": "refused", "code": "SW2017", "reason": "an encoder-decoder"}
    assert found["fuyu"] == {"verdict": "untested", "reason": "no tower"}
    assert document["types"]["llava"]["pipeline"]["verdict"] == "untested"


def test_every_type_has_every_column() -> None:
    table = model_support.support()
    assert set(table.types) == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert tuple(table.columns) == model_support.COLUMNS == tuple(matrix.COLUMNS)
    for cells in table.types.values():
        assert tuple(cells) == model_support.COLUMNS
        for cell in cells.values():
            assert cell.verdict in model_support.VERDICTS
            assert (cell.code in CODES) == (cell.verdict == "refused")
            assert bool(cell.reason) == (cell.verdict != "verified")
            assert cell.verdict != "verified" or None not in (cell.loss, cell.norm, cell.weights)


def composed(area: str, case: dict[str, Any]) -> dict[str, dict[str, object]]:
    document = matrix.compose({area: (DATE, {"llama": case})}, EMPTY)
    cells: dict[str, dict[str, object]] = document["types"]["llama"]
    return cells


FIGURES: dict[str, Any] = {
    "loss": 1.23456e-7,
    "norm": 0.0,
    "weights": 2e-8,
    "sharded": 1.0,
    "unused": 0,
}


def test_a_run_replaces_its_column_alone() -> None:
    document = matrix.compose(
        {"zoo-zero": (DATE, {"llama": {"verdict": "proved", **FIGURES}})}, committed()
    )
    cells = document["types"]["llama"]
    assert cells["zero"] == {
        "verdict": "verified",
        "loss": 1.2e-7,
        "norm": 0.0,
        "weights": 2e-8,
        "sharded": 1.0,
    }
    before = committed()["types"]
    assert all(cells[c] == before["llama"][c] for c in model_support.COLUMNS[1:])
    assert {c["zero"]["verdict"] for t, c in document["types"].items() if t != "llama"} == {
        "untested"
    }


def test_a_refusal_keeps_its_code_and_reason() -> None:
    cells = composed("zoo-pipeline", {"verdict": "refused", "refused": "SW2016", "reason": "why"})
    assert cells["pipeline"] == {"verdict": "refused", "code": "SW2016", "reason": "why"}


@pytest.mark.parametrize("verdict", ["wrong", "error"])
def test_what_went_wrong_is_not_proved(verdict: str) -> None:
    cells = composed(
        "zoo-pipeline", {"verdict": verdict, **(FIGURES if verdict == "wrong" else {})}
    )
    assert cells["pipeline"]["verdict"] == "untested" and "its run" in str(
        cells["pipeline"]["reason"]
    )


def test_a_type_that_is_cut_in_part_is_not_sharded() -> None:
    cells = composed("zoo-tensor", {"verdict": "proved", **FIGURES, "sharded": 0.5})
    assert cells["tensor_sharded"]["verdict"] == "untested" and "50%" in str(
        cells["tensor_sharded"]["reason"]
    )


def test_what_a_type_gets_of_tensor_parallelism() -> None:
    proved: dict[str, Any] = {"verdict": "proved"}
    refused: dict[str, Any] = {"verdict": "refused", "reason": "why"}
    planned = dict.fromkeys(RUNNABLE, refused)
    gathered = dict.fromkeys(RUNNABLE, proved)
    planned |= {
        "llama": {**proved, "whole": ["norm"]},
        "falcon/multi_query": {**proved, "whole": ["b", "a"]},
    }
    gathered |= {"gpt2": refused}
    verified, unsplit = matrix.tensor_tables(planned, gathered)
    assert verified["llama"] == verified["falcon"] == "sharded"
    assert unsplit == {"llama": ["norm"], "falcon": ["a", "b"]}
    assert verified["gpt2"] == {"refused": "why"} and verified["mistral"] == "fallback"
    assert list(verified) == list(json.loads(matrix.TENSOR_VERIFIED.read_text()))


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("lama", "llama"),
        ("LlamaForCausalLM", "llama"),
        ("Llama3", "llama"),
        ("gpt-neo", "gpt_neo"),
        ("GPT-2", "gpt2"),
        ("Qwen2.5", "qwen2"),
        ("qwen9", "qwen3"),
        ("mistral-large", "mistral"),
        ("phi-3", "phi3"),
        ("gemma-2", "gemma2"),
        ("deepseek_v5", "deepseek_v4"),
        ("EleutherAI/xyzzy", None),
        ("", None),
    ],
)
def test_nearest_names(text: str, nearest: str | None) -> None:
    found = model_support.nearest_types(text, model_support.support().types)
    assert found[:1] == (() if nearest is None else (nearest,)), found
    assert len(found) <= 3

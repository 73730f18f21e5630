"""The support matrix is what the benchmarks measured, for every causal-LM type of the installed
transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from shardwright.diagnostics.code_registry import CODES
from shardwright.models import model_support
from tools.generate import support_matrix as matrix


def test_support_json_is_what_the_benchmarks_compose_to() -> None:
    assert model_support.support_text() == matrix.text(matrix.compose()), "run `make generated`"
    assert model_support.support_text("image-text-to-text") == matrix.text(matrix.compose_vlm()), (
        "run `make generated`"
    )


def test_what_the_zoo_says_of_types_that_see(tmp_path: Path) -> None:
    cases = {
        "llava": {"verdict": "proved", "loss": 1.234e-6, "norm": 1e-7, "weights": 1e-8},
        "udop": {
            "verdict": "refused",
            "refused": "SW2017",
            "reason": "an encoder-decoder",
            "why": "it is",
        },
        "fuyu": {"verdict": "not proved", "reason": "no tower"},
    }
    (tmp_path / "zoo-vlm-zero.json").write_text(json.dumps({"date": "2026-01-02", "cases": cases}))
    document = matrix.compose_vlm(tmp_path)
    assert (
        document["columns"]["zero"]["date"] == "2026-01-02"
        and set(document["types"]) == model_support.vision_language_types()
    )
    found = {t: document["types"][t]["zero"] for t in cases}
    assert found["llava"] == {"verdict": "verified", "loss": 1.2e-6, "norm": 1e-7, "weights": 1e-8}
    assert found["udop"] == {"verdict": "refused", "code": "SW2017", "reason": "an encoder-decoder"}
    assert found["fuyu"] == {"verdict": "untested", "code": "", "reason": "no tower"}
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


def composed(folder: Path, area: str, case: dict[str, object]) -> dict[str, dict[str, object]]:
    document = {"date": "2026-01-02", "cases": {"llama": case}}
    (folder / f"{area}.json").write_text(json.dumps(document))
    cells: dict[str, dict[str, object]] = matrix.compose(folder)["types"]["llama"]
    return cells


FIGURES = {"loss": 1.23456e-7, "norm": 0.0, "weights": 2e-8, "sharded": 1.0, "unused": 0}


def test_no_run_is_untested(tmp_path: Path) -> None:
    cells = composed(tmp_path, "zoo-zero", {"verdict": "proved", **FIGURES})
    assert cells["zero"] == {
        "verdict": "verified",
        "loss": 1.2e-7,
        "norm": 0.0,
        "weights": 2e-8,
        "sharded": 1.0,
    }
    assert {cells[c]["verdict"] for c in model_support.COLUMNS[1:]} == {"untested"}
    assert {
        c["zero"]["verdict"] for t, c in matrix.compose(tmp_path)["types"].items() if t != "llama"
    } == {"untested"}


def test_a_refusal_keeps_its_code_and_reason(tmp_path: Path) -> None:
    cells = composed(
        tmp_path, "zoo-pipeline", {"verdict": "refused", "refused": "SW2016", "reason": "why"}
    )
    assert cells["pipeline"] == {"verdict": "refused", "code": "SW2016", "reason": "why"}


@pytest.mark.parametrize("verdict", ["wrong", "error"])
def test_what_went_wrong_is_not_proved(verdict: str, tmp_path: Path) -> None:
    cells = composed(
        tmp_path, "zoo-pipeline", {"verdict": verdict, **(FIGURES if verdict == "wrong" else {})}
    )
    assert cells["pipeline"]["verdict"] == "untested" and "its run" in str(
        cells["pipeline"]["reason"]
    )


def test_a_type_that_is_cut_in_part_is_not_sharded(tmp_path: Path) -> None:
    cells = composed(tmp_path, "zoo-tensor", {"verdict": "proved", **FIGURES, "sharded": 0.5})
    assert cells["tensor_sharded"]["verdict"] == "untested" and "50%" in str(
        cells["tensor_sharded"]["reason"]
    )


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

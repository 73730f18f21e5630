"""Captions with a picture each: what a row holds, as Hugging Face's processor has it, and what bad
records get."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig, AutoProcessor

from shardwright.cli.main import main
from shardwright.compile.compiled_folder import write_folder
from shardwright.compile.recipe_compiler import compile_recipe
from shardwright.data.data_preparation import prepare
from shardwright.data.data_summary import summarize
from shardwright.data.dataset import open_dataset
from shardwright.diagnostics import Refusal
from shardwright.models.image_processor import ProcessorUnavailable, pair_processor_files
from shardwright.plan.plan import Plan
from shardwright.recipe.recipe_loader import load_recipe
from tests.parity.contrastive import LENGTH, MODELS, PairCase, recipe, write_pairs


def compiled(folder: Path, model: str = "clip", **data: Any) -> Plan:
    document = recipe(PairCase(model))
    document["data"] |= data
    (folder / "recipe.yaml").write_text(json.dumps(document), encoding="utf-8")
    made = compile_recipe(load_recipe(folder / "recipe.yaml"))
    write_folder(folder / "out", made.files)
    return made.plan


@pytest.mark.parametrize("model", list(MODELS))
def test_rows_are_what_the_processor_makes(model: str, tmp_path: Path) -> None:
    records = write_pairs(tmp_path)
    plan = compiled(tmp_path, model)
    prepare(plan, tmp_path / "out", limit_bytes=None)
    block = open_dataset(plan, tmp_path / "out").train.read(np.arange(len(records)))
    kind = AutoProcessor.from_pretrained(tmp_path / "out" / "tokenizer", local_files_only=True)
    options = {"padding": "max_length", "truncation": True, "max_length": LENGTH}
    wanted = kind.tokenizer([row["caption"] for row in records], **options)["input_ids"]
    assert block.tokens.tolist() == wanted
    assert any(len(row["caption"]) > LENGTH for row in records)  # some are cut
    assert [Path(str(row[0].path)).name for row in block.pictures] == [
        Path(r["image"]).name for r in records
    ]
    (part,) = summarize(plan, tmp_path / "out")
    assert part.pictures == part.documents == len(records) and part.cut and 0 < part.padding < 1


def test_the_command_tells_of_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing of a caption is a label."""
    records = write_pairs(tmp_path)
    compiled(tmp_path)
    assert main(["prepare", str(tmp_path / "out"), "--check", "2"]) == 0
    (row,) = (
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("jsonl ") and line[-2:] == " 0"
    )
    assert row.split()[2:] == ["2", row.split()[3], "-", "-", "0"]
    assert main(["prepare", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    assert (
        f"  {len(records)} captions with {len(records)} images; " in text
        and "<|startoftext|>" in text
    )
    assert (
        "\nimages     a core of this machine decodes" in text and text.count("[[") == 3
    )  # of the heads alone


def lines(folder: Path, records: list[dict[str, Any]]) -> None:
    (folder / "data.jsonl").write_text(
        "".join(json.dumps(r) + "\n" for r in records), encoding="utf-8"
    )


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"image": None}, "SW6138"),
        ({"caption": 7}, "SW6110"),
        ({"image": "pictures/none.png"}, "SW6134"),
        ({"image": "../outside.png"}, "SW6135"),
    ],
)
def test_a_bad_record_gets_a_code(change: dict[str, Any], code: str, tmp_path: Path) -> None:
    records = write_pairs(tmp_path)
    lines(tmp_path, [{**records[0], **change}, *records[1:]])
    plan = compiled(tmp_path)
    with pytest.raises(Refusal, match=code):
        prepare(plan, tmp_path / "out", limit_bytes=None)


def test_damaged_pictures_are_counted_up_to_the_limit(tmp_path: Path) -> None:
    records = write_pairs(tmp_path)
    (tmp_path / "pictures" / "3.png").write_bytes(b"no picture")
    plan = compiled(tmp_path, skip_damaged=0.05)
    prepare(plan, tmp_path / "out", limit_bytes=None)
    (part,) = summarize(plan, tmp_path / "out")
    assert part.damaged == 1 and part.documents == len(records) - 1


@pytest.mark.parametrize(
    ("data", "code"),
    [
        ({"kind": "text"}, "SW1407"),
        ({"images": {"per_row": 2, "max_pixels": 4096}}, "SW1408"),
        ({"packing": True}, "SW3125"),
    ],
)
def test_data_of_another_kind_is_refused(data: dict[str, Any], code: str, tmp_path: Path) -> None:
    write_pairs(tmp_path)
    document = recipe(PairCase("clip"))
    document["data"] |= data
    if data.get("kind") == "text":
        document["data"] = {"kind": "text", "path": "data.jsonl", "packing": False}
    (tmp_path / "recipe.yaml").write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(Refusal, match=code):
        compile_recipe(load_recipe(tmp_path / "recipe.yaml"))


def test_the_end_of_a_text_needs_an_id_beside_the_bytes() -> None:
    config = AutoConfig.for_model("clip", **{**MODELS["clip"], "text_config": {"vocab_size": 260}})
    with pytest.raises(ProcessorUnavailable, match="eos_token_id"):
        pair_processor_files(config)

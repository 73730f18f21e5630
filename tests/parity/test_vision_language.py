"""Models that see train as plain Hugging Face does, with none, one or two pictures of several sizes
in a row: in a pipeline, and over data ranks of which some have no picture in a micro-batch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from shardwright.utils.numeric_difference import state_dict_max_abs_diff
from tests.figures import lines_apart
from tests.parity.case_launches import launched
from tests.parity.harness import (
    LOSS_ABSOLUTE,
    NORM_RELATIVE,
    WEIGHT_ABSOLUTE,
    metrics,
    must,
    newest_checkpoint,
    shardwright,
)
from tests.parity.vision_language import (
    FEW_STEPS,
    MODELS,
    VlmCase,
    recipe,
    reference,
    write_pictures,
)

pytestmark = pytest.mark.launch

Record = Callable[[str, str, dict[str, Any]], None]

SAMPLE = {
    "qwen2_5_vl pp2": VlmCase("qwen2_5_vl", pipeline=2, micro=2),
    "qwen3_vl pp2": VlmCase("qwen3_vl", pipeline=2, micro=2, checkpointing="full"),
    "gemma3 pp2 tied": VlmCase("gemma3", pipeline=2, tied=True),
    "llava dp2 zero3": VlmCase("llava", data=2, zero_stage=3),
    "qwen3_vl pp2 tower frozen": VlmCase(
        "qwen3_vl", pipeline=2, micro=2, freeze=("vision", "projector")
    ),
    "gemma3 dp2 zero3 projector alone": VlmCase(
        "gemma3", data=2, zero_stage=3, freeze=("vision", "text")
    ),
    "llava pp2 head alone": VlmCase(
        "llava", pipeline=2, micro=2, freeze=("vision", "projector", "model.language_model.*")
    ),
    "qwen2_5_vl dp2 zero2": VlmCase("qwen2_5_vl", data=2, zero_stage=2),
    "paligemma pp2": VlmCase("paligemma", pipeline=2, micro=2),
    "paligemma2 pp2": VlmCase("paligemma2", pipeline=2, micro=2),
    "paligemma2 dp2 zero1": VlmCase("paligemma2", data=2, zero_stage=1),
}
BOTH = ("qwen3_vl", "gemma3")
"""Whose layouts are all tried; of the others those that differ."""
EVERY: dict[str, dict[str, Any]] = {
    "pp2": {"pipeline": 2, "micro": 2},
    "dp2 zero3": {"data": 2, "zero_stage": 3, "checkpointing": "full"},
    "pp2 tower frozen": {"pipeline": 2, "micro": 2, "freeze": ("vision", "projector")},
    "pp2 text frozen": {"pipeline": 2, "micro": 2, "freeze": ("text",)},
}
MORE: dict[str, dict[str, Any]] = {
    "dp2 zero0": {"data": 2, "zero_stage": 0},
    "dp2 zero1": {"data": 2, "zero_stage": 1},
    "dp2 zero2": {"data": 2, "zero_stage": 2},
    "dp2 zero2 projector alone": {"data": 2, "zero_stage": 2, "freeze": ("vision", "text")},
    "dp2 zero1 lora": {"data": 2, "zero_stage": 1, "lora": True},
    "dp2 zero3 lora": {"data": 2, "zero_stage": 3, "lora": True},
    "pp2 tied": {"pipeline": 2, "micro": 2, "tied": True},
    "dp2 zero3 tied": {"data": 2, "zero_stage": 3, "tied": True},
    "tp2": {"tensor": 2, "micro": 2},
    "tp2 tied tower frozen": {"tensor": 2, "tied": True, "freeze": ("vision",)},
}
FOUR: dict[str, dict[str, Any]] = {
    "pp2 tp2": {"pipeline": 2, "tensor": 2},
    "tp2 dp2 zero3": {"tensor": 2, "data": 2, "zero_stage": 3},
    "pp2 dp2": {"pipeline": 2, "data": 2},
    "pp2 dp2 zero1 tied full": {"pipeline": 2, "data": 2, "tied": True, "checkpointing": "full"},
}


def check(cases: dict[str, VlmCase], out: Path, proved: Record | None = None) -> None:
    for name, figures in launched(cases, out, "vision_language_worker.py").items():
        if proved is not None:
            proved("vlm-parity", name, figures)
        assert figures["loss"] <= LOSS_ABSOLUTE, (name, figures)
        assert figures["norm"] <= NORM_RELATIVE, (name, figures)
        assert figures["weights"] <= WEIGHT_ABSOLUTE, (name, figures)


def test_two_ranks_train_as_one(tmp_path: Path) -> None:
    check(
        {name: dataclasses.replace(case, steps=FEW_STEPS) for name, case in SAMPLE.items()},
        tmp_path,
    )


@pytest.mark.prove
@pytest.mark.parametrize("model", MODELS)
def test_every_layout_of_two_ranks(model: str, tmp_path: Path, proved: Record) -> None:
    layouts = {**EVERY, **(MORE if model in BOTH else {})}
    check(
        {f"{model} {name}": VlmCase(model, **fields) for name, fields in layouts.items()},
        tmp_path,
        proved,
    )


TENSOR = {
    "qwen3_vl tp2": VlmCase("qwen3_vl", tensor=2, micro=2, checkpointing="full"),
    "gemma3 tp2 tied": VlmCase("gemma3", tensor=2, tied=True),
    "llava tp2 tower frozen": VlmCase("llava", tensor=2, freeze=("vision",)),
    "qwen2_5_vl tp2": VlmCase("qwen2_5_vl", tensor=2),
    "qwen3_vl dp2 zero3 lora": VlmCase("qwen3_vl", data=2, zero_stage=3, lora=True),
    "gemma3 dp2 zero1 lora": VlmCase("gemma3", data=2, zero_stage=1, lora=True),
}


@pytest.mark.prove
def test_a_text_part_without_sdpa(tmp_path: Path) -> None:
    check({name: case for name, case in SAMPLE.items() if name.startswith("paligemma2")}, tmp_path)


@pytest.mark.prove
def test_tensor_ranks_and_adapters(tmp_path: Path) -> None:
    check(
        {name: dataclasses.replace(case, steps=FEW_STEPS) for name, case in TENSOR.items()},
        tmp_path,
    )


CUT = {
    "smolvlm pp2 tiles": VlmCase("smolvlm", pipeline=2, micro=2, tiles=True),
    "smolvlm dp2 zero3 tiles": VlmCase("smolvlm", data=2, zero_stage=3, tiles=True),
}


@pytest.mark.prove
def test_pictures_that_are_cut_into_tiles(tmp_path: Path) -> None:
    check(
        {name: dataclasses.replace(case, steps=FEW_STEPS) for name, case in CUT.items()}, tmp_path
    )


@pytest.mark.prove
def test_tiles_in_every_step(tmp_path: Path, proved: Record) -> None:
    check(CUT, tmp_path, proved)


@pytest.mark.prove
def test_four_ranks(tmp_path: Path, proved: Record) -> None:
    check(
        {
            f"{model} {name}": VlmCase(model, **fields)
            for model in BOTH
            for name, fields in FOUR.items()
        },
        tmp_path,
        proved,
    )


@pytest.mark.prove
def test_checkpoints_go_on_in_another_layout_and_export(tmp_path: Path) -> None:
    """Four steps in a pipeline, four over data ranks at ZeRO-3: as one process trains all eight."""
    write_pictures(tmp_path)
    first, second = (
        VlmCase("llava", pipeline=2, micro=2),
        VlmCase("llava", data=2, zero_stage=3),
    )
    for name, case in (("first", first), ("second", second)):
        document = recipe(case)
        document["checkpoint"]["every_steps"] = 4
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
        must(shardwright("compile", tmp_path / f"{name}.json", "-o", tmp_path / name))
    must(shardwright("run", tmp_path / "first"))
    must(
        shardwright(
            "run",
            tmp_path / "second",
            "--resume",
            tmp_path / "first" / "checkpoints" / "step-00000004",
        )
    )
    wanted = reference("llava", False, tmp_path, tmp_path / "first" / "tokenizer")
    before, after = metrics(tmp_path / "first"), metrics(tmp_path / "second")
    assert [line["step"] for line in after] == [5, 6, 7, 8]
    for lines in (before, [*before[:4], *after]):
        figures = lines_apart(lines, wanted)
        assert figures["loss"] <= LOSS_ABSOLUTE and figures["norm"] <= NORM_RELATIVE, figures

    hf = tmp_path / "hf"
    must(shardwright("export", newest_checkpoint(tmp_path / "second"), "-o", hf))
    model = AutoModelForImageTextToText.from_pretrained(hf, dtype=torch.float32)
    assert (
        state_dict_max_abs_diff(dict(model.named_parameters()), wanted.weights) <= WEIGHT_ABSOLUTE
    )
    processor = AutoProcessor.from_pretrained(hf)
    question = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}
    ]
    text = processor.apply_chat_template(question, add_generation_prompt=True)
    assert text == "<user><image>What is it?\n<assistant>"
    (file, *_) = sorted((tmp_path / "pictures").iterdir())
    inputs = processor(text=[text], images=[Image.open(file).convert("RGB")], return_tensors="pt")
    assert model(**inputs).logits.isfinite().all()
    said = must(
        shardwright(
            "generate", hf, "--prompt", "What is it?", "--image", file, "--tokens", 4, "--json"
        )
    )
    assert json.loads(said.stdout)["prompt_tokens"] == inputs["input_ids"].shape[1]

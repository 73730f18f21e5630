"""`generate --image` writes what transformers writes with the export of the same checkpoint and the
same processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from shardwright.cli.main import main
from shardwright.compile.compiled_folder import write_folder
from shardwright.compile.recipe_compiler import compile_recipe
from shardwright.models.image_processor import load_processor
from shardwright.parallel.model_loading import load_config
from shardwright.plan.plan import read_plan
from shardwright.recipe.recipe_loader import load_recipe
from tests.parity.vision_language import IMAGE, VlmCase, recipe, template, write_pictures
from tests.unit.checkpoint.written_checkpoints import write_model_checkpoint

QUESTION = "What is it?"


def made(model: str, folder: Path) -> Path:
    """A checkpoint of a tiny model with random weights."""
    write_pictures(folder, 4)
    (folder / "recipe.json").write_text(json.dumps(recipe(VlmCase(model))))
    write_folder(folder / "out", compile_recipe(load_recipe(folder / "recipe.json")).files)
    torch.manual_seed(0)
    plain = AutoModelForImageTextToText.from_config(
        load_config(read_plan(folder / "out"), folder / "out")
    )
    state = {
        name: 8 * parameter for name, parameter in plain.named_parameters()
    }  # drawn small: all tokens alike
    return write_model_checkpoint(folder / "out", state)


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main(["generate", *map(str, arguments), "--json"]) == 0, capsys.readouterr().err
    return dict(json.loads(capsys.readouterr().out))


@pytest.mark.prove
@pytest.mark.parametrize("model", ["llava", "qwen2_5_vl"])
def test_it_is_what_transformers_writes_with_the_export(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step, hf = made(model, tmp_path), tmp_path / "hf"
    assert main(["export", str(step), "-o", str(hf)]) == 0
    capsys.readouterr()
    loaded, processor = AutoModelForImageTextToText.from_pretrained(hf), load_processor(hf)
    picture = Image.effect_noise((40, 20), 80).convert("RGB")
    picture.save(tmp_path / "it.png")
    text = f"<user>{IMAGE.get(model, '<image>')}{QUESTION}\n<assistant>"
    inputs = processor(text=[text], images=[[picture]], return_tensors="pt")
    tokenizer = processor.tokenizer
    assert tokenizer.chat_template == template(model)
    wanted = loaded.generate(
        **inputs,
        max_new_tokens=6,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
        suppress_tokens=list(range(len(tokenizer), 264)),
    )[0, inputs["input_ids"].shape[1] :]
    for folder in (step, hf):
        answer = said(
            capsys, folder, "--prompt", QUESTION, "--image", tmp_path / "it.png", "--tokens", 6
        )
        assert answer["text"] == tokenizer.decode(wanted, skip_special_tokens=True), folder
        assert answer["prompt_tokens"] == inputs["input_ids"].shape[1]


def test_pictures_that_cannot_be_asked_about(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = made("llava", tmp_path)
    (tmp_path / "it.png").write_bytes(b"not a picture")
    assert (
        main(["generate", str(step), "--prompt", QUESTION, "--image", str(tmp_path / "it.png")])
        == 1
    )
    told = capsys.readouterr().err
    assert "SW6402" in told and "cannot be opened as an image" in told

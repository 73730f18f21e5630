"""An export and `generate` end a text with the tokens that the run trained as ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from shardwright.cli.main import main
from shardwright.compile.compiled_folder import write_folder
from shardwright.compile.recipe_compiler import compile_recipe
from shardwright.data.conversations import end_of_turn_id
from shardwright.parallel.model_loading import load_config
from shardwright.plan.plan import read_plan
from shardwright.recipe.recipe_loader import load_recipe
from tests.conftest import SMALL_RECIPE
from tests.unit.checkpoint.written_checkpoints import write_model_checkpoint
from tests.unit.data.chat_families import FAMILIES, tokenizers

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content "
    "}}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
WORDS = [
    "<|im_end|>",
    "<|eot_id|>",
    "[UNK]",
    "</s>",
    "<s>",
    "hi",
    "user",
    "assistant",
    "<|im_start|>",
]
CHAT = {"kind": "chat", "path": "drawn-shapes", "tokenizer": "./tok"}
TEXT = {"kind": "text", "path": "python-stdlib", "tokenizer": "./tok"}


def write_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(
        models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([word for word in WORDS if word.startswith("<")])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", bos_token="<s>", unk_token="[UNK]"
    )
    made.save_pretrained(folder)


def checkpoint(folder: Path, data: dict[str, Any], model: dict[str, Any] | None = None) -> Path:
    """Its model writes id 0 and nothing else."""
    write_tokenizer(folder / "tok")
    recipe = {**SMALL_RECIPE, "data": data, **({} if model is None else {"model": model})}
    (folder / "recipe.json").write_text(json.dumps(recipe))
    write_folder(folder / "out", compile_recipe(load_recipe(folder / "recipe.json")).files)
    torch.manual_seed(0)
    built = AutoModelForCausalLM.from_config(load_config(read_plan(folder / "out"), folder / "out"))
    state = {name: weight * (name != "lm_head.weight") for name, weight in built.named_parameters()}
    return write_model_checkpoint(folder / "out", state)


def exported(step: Path, folder: Path) -> dict[str, Any]:
    assert main(["export", str(step), "-o", str(folder)]) == 0
    return dict(json.loads((folder / "generation_config.json").read_text()))


@pytest.mark.parametrize(
    ("data", "ends"),
    [
        ({**CHAT, "template": CHATML}, 0),
        ({**CHAT, "template": LLAMA3}, 1),
        (TEXT, 3),
        (
            {"mixture": [{**TEXT, "weight": 1.0}, {**CHAT, "template": CHATML, "weight": 1.0}]},
            [3, 0],
        ),
    ],
    ids=["chatml", "llama 3", "documents", "documents and chatml"],
)
def test_the_trained_ends_are_exported(
    data: dict[str, Any], ends: int | list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = checkpoint(tmp_path, data)
    written = exported(step, tmp_path / "hf")
    assert (written["eos_token_id"], written["bos_token_id"]) == (ends, 4)
    assert (
        AutoModelForCausalLM.from_pretrained(tmp_path / "hf").generation_config.eos_token_id == ends
    )
    for folder in (step, tmp_path / "hf"):
        capsys.readouterr()
        assert main(["generate", str(folder), "--prompt", "hi", "--tokens", "4", "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert (answer["stopped"], answer["tokens"]) == (
            (True, 1) if ends in (0, [3, 0]) else (False, 4)
        ), folder


def test_the_models_own_settings_and_ends_stay(tmp_path: Path) -> None:
    config = load_config_of_small()
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    own = {
        "eos_token_id": [3, 7],
        "bos_token_id": 4,
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.9,
    }
    (tmp_path / "base" / "generation_config.json").write_text(json.dumps(own))
    model = {"source": "./base", "weights": "pretrained"}
    step = checkpoint(tmp_path, {**CHAT, "template": CHATML}, model)
    assert exported(step, tmp_path / "hf") == {**own, "eos_token_id": [0, 3, 7]}


def load_config_of_small() -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(**SMALL_RECIPE["model"]["config"])


def test_the_end_of_an_answer_in_published_templates(tmp_path: Path) -> None:
    tokenizer = tokenizers(tmp_path)["byte-level"]
    ends = {}
    for name in ("chatml", "qwen2_5", "llama3", "gpt_oss", "gemma3", "glm4", "phi4"):
        family = FAMILIES[name]
        tokenizer._hf.add_special_tokens(
            {"bos_token": family.bos or "</s>", "eos_token": family.eos or "</s>"}
        )
        end = end_of_turn_id(tokenizer, family.plain)
        ends[name] = None if end is None else tokenizer._hf.convert_ids_to_tokens(end)
    assert ends == {
        "chatml": "<|im_end|>",
        "qwen2_5": "<|im_end|>",
        "llama3": "<|eot_id|>",
        "gpt_oss": "<|return|>",
        "gemma3": "<end_of_turn>",
        "glm4": "<|user|>",
        "phi4": "<|im_end|>",
    }

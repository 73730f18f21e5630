"""`generate` writes what transformers writes with the export of the same checkpoint."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from shardwright.checkpoint.checkpoint_manifest import MANIFEST
from shardwright.cli.main import main
from shardwright.compile.compiled_folder import write_folder
from shardwright.compile.recipe_compiler import compile_recipe
from shardwright.parallel.model_loading import load_config
from shardwright.plan.plan import read_plan
from shardwright.recipe.recipe_loader import load_recipe
from tests.conftest import SMALL_RECIPE
from tests.unit.checkpoint.written_checkpoints import write_model_checkpoint

TIED = {
    "model_type": "gpt2",
    "vocab_size": 300,
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 64,
}
LORA = {"rank": 4, "alpha": 32, "target_modules": ["q_proj", "v_proj"]}
DATA = {"kind": "text", "path": "python-stdlib", "tokenizer": "byte"}
RECIPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied, a padded vocabulary": {"model": {"config": TIED, "weights": "random"}},
    "lora": {
        "lora": LORA,
        "parallelism": {"tensor": 1, "pipeline": 1, "data": 4, "micro_batch_size": 2},
    },
}


def made(name: str, folder: Path) -> Path:
    (folder / "recipe.json").write_text(json.dumps({**SMALL_RECIPE, "data": DATA, **RECIPES[name]}))
    write_folder(folder / "out", compile_recipe(load_recipe(folder / "recipe.json")).files)
    plan = read_plan(folder / "out")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(load_config(plan, folder / "out"))
    state = {
        name: 8 * parameter for name, parameter in model.named_parameters()
    }  # drawn small: all tokens alike
    for path in [
        path
        for path in state
        if plan.lora and path.rpartition(".")[0].endswith(plan.lora.target_modules)
    ]:
        rows, columns = state[path].shape
        module = path.removesuffix(".weight")
        state[f"{module}.lora_A.default.weight"] = torch.randn(4, columns)
        state[f"{module}.lora_B.default.weight"] = torch.randn(rows, 4)
    return write_model_checkpoint(folder / "out", state)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made("llama", tmp_path_factory.mktemp("llama"))


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main(["generate", *map(str, arguments), "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return dict(json.loads(captured.out))


@pytest.mark.parametrize("name", RECIPES)
def test_it_is_what_transformers_writes_with_the_export(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = made(name, tmp_path)
    assert main(["export", str(step), "-o", str(tmp_path / "hf"), "--merge"]) == 0
    capsys.readouterr()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert model.generation_config.eos_token_id is None
    prompt = "def schön("
    ids = tokenizer(prompt, return_tensors="pt")
    wanted = model.generate(
        **ids,
        max_new_tokens=12,
        do_sample=False,
        pad_token_id=0,
        suppress_tokens=list(range(256, 300)),
    )
    text = tokenizer.decode(wanted[0, len(prompt.encode()) :])
    capsys.readouterr()
    for folder in (step, tmp_path / "hf"):
        answer = said(capsys, folder, "--prompt", prompt, "--tokens", 12)
        assert (answer["text"], answer["tokens"], answer["prompt_tokens"]) == (text, 12, 11), folder
        assert (answer["prompt"], answer["stopped"], answer["device"]) == (prompt, False, "cpu")


def test_drawing_at_random_is_repeatable(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def draw(seed: int) -> str:
        warm = ("--temperature", 1.5, "--seed", seed, "--tokens", 8)
        return str(said(capsys, llama, "--prompt", "x", *warm)["text"])

    assert draw(1) == draw(1) != draw(2)


def test_the_prompt_from_standard_input_and_the_end_of_the_positions(
    llama: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("import ö\n".encode())))
    assert main(["generate", str(llama), "--prompt", "-", "--tokens", "500"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("import ö\n") and len(out.encode()) >= 64
    assert said(capsys, llama, "--prompt", "x" * 60, "--tokens", 500)["tokens"] == 4


@pytest.mark.parametrize(
    "arguments",
    [["--prompt", ""], ["--prompt", "x" * 64], ["--prompt", "a\udcff"], ["--prompt", "x", "--tokens", "0"],  # noqa: E501
     ["--prompt", "x", "--temperature", "nan"], []],
)  # fmt: skip
def test_what_cannot_be_continued_is_said(
    arguments: list[str], llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(llama), *arguments]) == 1
    assert "our fault" not in capsys.readouterr().err


def test_folders_that_are_none(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(folder: Path) -> str:
        assert main(["generate", str(folder), "--prompt", "x"]) == 1
        return capsys.readouterr().err

    assert "SW6402" in refused(tmp_path) and "step-XXXXXXXX" in refused(tmp_path)
    assert str(llama) in refused(llama.parent.parent), (
        "a run's folder is told its newest checkpoint"
    )
    damaged = Path(shutil.copytree(llama, tmp_path / llama.name))
    (damaged / MANIFEST).write_text("{}")
    assert "SW6201" in refused(damaged)
    for text in (
        "[" * 100_000,
        "{}",
        '{"model_type": 5}',
        '{"model_type": "llama"}',
        '{"model_type": "t5"}',
    ):
        (tmp_path / "config.json").write_text(text)
        assert "SW6402" in refused(tmp_path), text[:40]
    scores = {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}
    (tmp_path / "config.json").write_text(json.dumps(scores))
    said = refused(tmp_path)
    assert "SW6402" in said and "scores texts" in said
    (tmp_path / "config.json").unlink()
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "--merge" in refused(tmp_path)

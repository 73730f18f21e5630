"""Files and commands of each kind, as their projects document them, and the recipe of each.

expected_imports.json has a row an input: every value of its recipe, every FILL_IN with its reason,
and every setting that is left out; or the code and the message of its refusal.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from shardwright.cli.main import main
from shardwright.diagnostics import Refusal
from shardwright.migrate.config_import import ImportedRecipe, convert_config
from shardwright.migrate.file_kinds import KINDS, read_settings_file
from shardwright.migrate.run_files import settings_of
from shardwright.recipe.recipe_schema import FILL_IN
from shardwright.utils.shell_script import read_shell_commands
from tests.migrate.fuzz import changed_text, try_import
from tests.migrate.test_import import text_of, to_fill_in

INPUTS = Path(__file__).parent / "inputs"
ROWS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "expected_imports.json").read_text("utf-8")
)
# What `check` says of the filled-in layout beside FILL_INs: batches that the world does not divide.
LAYOUT_CODES = ("SW1203", "SW1204")


def _id(row: dict[str, Any]) -> str:
    return str(row.get("file") or row["launch"][:60])


def imported_row(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> ImportedRecipe:
    monkeypatch.chdir(INPUTS)
    return convert_config(row.get("file"), row.get("launch"), None, str(INPUTS))


@pytest.mark.parametrize("row", ROWS, ids=_id)
def test_the_recipe_is_the_tables(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    if "refused" in row:
        with pytest.raises(Refusal) as refusal:
            imported_row(row, monkeypatch)
        first = refusal.value.diagnostics[0]
        assert (first.code, first.message) == (row["refused"], row["message"])
        assert first.help
        return
    draft = imported_row(row, monkeypatch).draft
    values = {key: value for key, value in draft.values.items() if value != FILL_IN}
    assert values == row["values"]
    assert draft.fill == row["fill"]
    assert sorted(draft.left) == row["left"]


@pytest.mark.parametrize("row", [r for r in ROWS if "refused" not in r], ids=_id)
def test_the_recipe_reads(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe passes its schema apart from FILL_INs, and names all that it left out."""
    found = imported_row(row, monkeypatch)
    text = text_of(found)
    assert to_fill_in(text, *LAYOUT_CODES) == found.draft.fill.keys()
    comments = " ".join(line.partition("#")[2].strip() for line in text.splitlines() if "#" in line)
    for key in found.draft.left:
        assert key in comments, f"{key} has no comment"
    assert not found.draft.carried.keys() & found.draft.left.keys()
    assert "hf_secret" not in text and "hf_abc" not in text


@pytest.mark.parametrize(
    "row",
    [r for r in ROWS if str(r.get("file")).endswith((".yaml", ".yml")) and "refused" not in r],
    ids=_id,
)
def test_every_key_of_a_settings_file_is_carried_or_named(
    row: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = imported_row(row, monkeypatch).draft
    known = draft.carried.keys() | draft.left.keys()
    for name, _ in settings_of(read_settings_file(row["file"], "file").tree, ()):
        assert {name, name.partition(".")[2]} & known, name


def test_the_table_has_each_kind() -> None:
    assert len(ROWS) >= 60
    read = {kind.name for kind in KINDS if kind.read is not None}
    assert {"Accelerate", "LLaMA-Factory", "Axolotl", "ms-swift", "TRL", "DeepSpeed"} <= read
    files = {str(row.get("file") or "").partition("/")[0] for row in ROWS}
    assert files >= {p.name for p in INPUTS.iterdir()}


UNREAD = {
    "tokenizer_config.json": ('{"tokenizer_class": "LlamaTokenizer"}', "a tokenizer's config"),
    "adapter_config.json": ('{"peft_type": "LORA", "r": 8}', "a LoRA adapter's configuration"),
    "trainer_state.json": (
        '{"log_history": [], "global_step": 1, "num_train_epochs": 3}',
        "the Trainer's state of a checkpoint",
    ),
    "model.safetensors.index.json": ('{"weight_map": {}}', "an index of weight files"),
    "config.json": ('{"model_type": "t5", "hidden_size": 8, "tokenizer_class": "T"}', "a model's"),
    "plan.json": ('{"recipe_hash": "x", "strategy": {}}', "the plan of a compiled folder"),
    "small.yaml": ("extends: base.yaml\n", "a recipe"),
    "train.py": ("import torch\n", "a file of Python"),
    "verl.yaml": ("actor_rollout_ref: {}\n", "a configuration of verl"),
    "nanotron.yaml": ("parallelism: {}\ndata_stages: []\n", "a configuration of nanotron"),
}


@pytest.mark.parametrize("name", UNREAD)
def test_a_kind_that_no_command_reads(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, kind = UNREAD[name]
    (tmp_path / name).write_text(text)
    for command, code in (("import", "SW1455"), ("lint", "SW4011")):
        assert main([command, str(tmp_path / name)]) == 1
        shown = capsys.readouterr().err
        said = kind if command == "lint" else kind.removeprefix("a configuration of ")
        assert f"error[{code}]: {tmp_path / name} is " in shown and said in shown


@pytest.mark.parametrize(
    ("devices", "kept"), [("0,1", None), ("2,3", "2,3"), ("1,0", "1,0"), ("3", "3"), ("0", None)]
)
def test_a_choice_of_devices_is_kept(devices: str, kept: str | None) -> None:
    """The first N devices are those of every launcher; others stay in the environment."""
    command = f"CUDA_VISIBLE_DEVICES={devices} swift sft --model a/b --tuner_type full"
    values = convert_config(None, command, None, "/").draft.values
    assert values["cluster.gpus_per_node"] == len(devices.split(","))
    env = values.get("launch.env", {})
    assert isinstance(env, dict) and env.get("CUDA_VISIBLE_DEVICES") == kept


@pytest.mark.parametrize(
    ("words", "value", "asked"),
    [
        ("--recompute-granularity selective", "selective", ""),
        ("--recompute-granularity selective --recompute-modules moe mlp", ["moe", "mlp"], ""),
        ("--recompute-granularity selective --recompute-modules gdn_norm_out", None, "gdn_norm"),
        ("--recompute-granularity selective --recompute-modules $MODULES", None, "$MODULES"),
        ("--recompute-granularity full --recompute-modules moe", "full", ""),
    ],
)
def test_megatrons_recomputed_modules(
    words: str, value: str | list[str] | None, asked: str
) -> None:
    command = f"torchrun pretrain_gpt.py --num-layers 2 {words} --bf16"
    draft = convert_config(None, command, None, "/").draft
    key = "parallelism.activation_checkpointing"
    assert (asked in draft.fill[key]) if asked else draft.values[key] == value
    assert "--recompute_modules" in {**draft.carried, **draft.left} or "modules" not in words


def test_a_default_that_a_recipe_does_not_share() -> None:
    """LoRA's dropout is 0 in a recipe and 0.05 in TRL and ms-swift."""
    for command, dropout in (
        ("trl sft --model_name_or_path a/b --use_peft --lora_r 8 --lora_alpha 8", 0.05),
        ("swift sft --model a/b --tuner_type lora --lora_rank 8 --lora_alpha 8", 0.05),
        ("swift sft --model a/b --tuner_type lora --lora_rank 8 --lora_dropout 0", 0.0),
        ("llamafactory-cli train --model_name_or_path a/b --finetuning_type lora", None),
    ):
        assert convert_config(None, command, None, "/").draft.values.get("lora.dropout") == dropout


def test_a_command_in_a_file_without_an_ending(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "command").write_text("torchrun --nproc_per_node 8 train.py --max_steps 7\n")
    assert main(["import", str(tmp_path / "command")]) == 0
    assert "steps: 7 # --max_steps" in capsys.readouterr().out


CHANGED = sorted(
    path
    for path in INPUTS.rglob("*.*")
    if path.suffix in (".yaml", ".yml", ".sh", ".json") and "checkpoints" not in path.parts
)


@pytest.mark.parametrize("path", CHANGED, ids=lambda path: str(path.relative_to(INPUTS)))
def test_a_changed_file_is_a_recipe_or_a_refusal(path: Path, tmp_path: Path) -> None:
    rng = random.Random(path.name)
    for _ in range(5):
        assert try_import(changed_text(rng, path.read_text()), None, tmp_path, path.name) == []


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("A=1 b $A", [("b", "$A")]),
        ("A=1; b $A ${A}x '$A'", [("b", "1", "1x", "$A")]),
        ("A=(x 'y z')\nA+=(w)\nb \"${A[@]}\" ${A[*]}", [("b", "x", "y z", "w", "x", "y z", "w")]),
        ('A="--x 1 --y"; b $A "$A"', [("b", "--x", "1", "--y", "--x 1 --y")]),
        ("N=2; G=8; b $((N * $G)) $(($N+$M))", [("b", "16", "$(($N+$M))")]),
        ("b ${A:-4} ${A} $1 $(c d)", [("b", "${A:-4}", "${A}", "$1", "$(c d)")]),
        ("A=1\nif [ -z $B ]; then A=2; fi\nb $A", [("b", "$A")]),
        ("[ $B ] && A=2; b $A", [("b", "$A")]),
        ("for A in 1 2; do b $A; done", [("b", "$A")]),
        ("b > f 2>&1 x < g | tee h &", [("b", "x"), ("tee", "h")]),
        ("b a\\\n  c # d\n\ncat <<E\nb no\nE\n b e", [("b", "a", "c"), ("cat",), ("b", "e")]),
        ('export A=1\nunset X\nb "\\$A"', [("unset", "X"), ("b", "$A")]),
    ],
)
def test_the_words_of_a_script(script: str, words: list[tuple[str, ...]]) -> None:
    assert [command.words for command in read_shell_commands(script)] == words


def test_what_is_left_out_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(INPUTS)
    assert main(["import", "axolotl/fft_8b.yaml"]) == 0
    printed = capsys.readouterr()
    assert "not carried: " in printed.err
    assert "gradient_checkpointing_kwargs.use_reentrant" in printed.err
    assert printed.out.startswith("# Made by `shardwright import` of axolotl/fft_8b.yaml.")

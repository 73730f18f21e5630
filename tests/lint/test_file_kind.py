"""`lint` of a file that is no ds_config says what it is; Accelerate's own settings are linted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwright.cli.main import main
from shardwright.migrate.file_kinds import KINDS, other_file
from shardwright.recipe.recipe_parser import parse_recipe_text
from shardwright.recipe.recipe_tree import LineOffsets, node_value

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
OTHERS = {
    "recipe.yaml": (
        "version: 1\ncluster: {nodes: 1, gpu: h100-sxm-80gb}\n",
        "a recipe of Shardwright",
        "`shardwright check",
    ),
    "plan.json": ('{"recipe_hash": "x", "strategy": {}}', "the plan of a", "ds_config.json beside"),
    "fsdp.yaml": ("compute_environment: LOCAL_MACHINE\n", "Accelerate's", "no deepspeed_config"),
    "llama3_sft.yaml": (
        "model_name_or_path: m\nstage: sft\nfinetuning_type: full\ndeepspeed: ds_z3.json\n",
        "a configuration of LLaMA-Factory",
        "its `deepspeed` names",
    ),
    "axolotl.yml": ("base_model: m\ndatasets: []\n", "a configuration of Axolotl", "`deepspeed`"),
    "sft.yaml": ("per_device_train_batch_size: 1\n", "arguments of the Hugging", "`deepspeed`"),
    "config.json": (
        '{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8}',
        "a model's config.json",
        "--model",
    ),
    "adapter_config.json": ('{"peft_type": "LORA"}', "a LoRA adapter's", "ds_config.json"),
    "train.sh": ("#!/bin/bash\ndeepspeed train.py\n", "a shell script", "--for megatron"),
    "torchtitan.toml": ("[model]\n", "a file of TOML", "ds_config.json"),
    "some.yaml": ("first: 1\nsecond: 2\n", "a YAML file of no known kind", "ds_config.json"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_a_file_of_another_kind(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, kind, help = OTHERS[name]
    (tmp_path / name).write_text(text)
    assert main(["lint", str(tmp_path / name)]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith(f"error[SW4011]: {tmp_path / name} is {kind}")
    assert help in shown.partition("help: ")[2] and shown.count("error[") == 1


def test_recipes_are_recognized_and_ds_configs_are_not() -> None:
    recipes = [*(ROOT / "recipes").glob("*.yaml")]
    assert len(recipes) > 10
    for path in recipes:
        other = other_file(str(path), path.read_text())
        assert other is not None and other.phrase == "a recipe of Shardwright", path
    configs = [*HERE.glob("good/*.json"), *HERE.glob("bad/*.json")]
    for path in (*configs, *(ROOT / "tests/cases").glob("*/expected/ds_config*.json")):
        assert other_file(str(path), path.read_text()) is None, path
    assert len({kind.name for kind in KINDS}) == len(KINDS)


ACCELERATE = """compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
mixed_precision: bf16
deepspeed_config:
  zero_stage: 3
  gradient_accumulation_steps: 4
  offload_optimizer_device: cpu
  offload_param_device: none
  zero3_init_flag: true
  zero3_save_16bit_model: true
num_processes: 8
"""


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("", "", []),
        ("zero_stage: 3", "zero_stage: 4", [("SW4117", 5)]),
        ("save_16bit_model: true", "save_16bit_model: false", [("SW4415", 10)]),
        ("offload_param_device: none", "offload_param_device: disk", [("SW4117", 8)]),
        (
            "  offload_optimizer_device: cpu\n",
            "  zero_optimization:\n    stage: 3\n  offload_optimizer_device: cpu\n",
            [("SW4012", 7)],
        ),
        (
            "zero_stage: 3\n",
            "zero_stage: 0\n",
            [("SW4310", 5), ("SW4403", 7), ("SW4401", 10)],
        ),
    ],
)  # fmt: skip
def test_accelerates_own_settings(
    before: str,
    after: str,
    told: list[tuple[str, int]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "accelerate.yaml"
    path.write_text(ACCELERATE.replace(before, after, 1) if before else ACCELERATE)
    main(["lint", str(path), "--format", "json"])
    (line,) = capsys.readouterr().out.splitlines()
    found = [(d["code"], d["line"]) for d in json.loads(line)["diagnostics"]]
    assert found == told


def test_accelerates_file_names_a_ds_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ds.json").write_text(
        '{"train_micro_batch_size_per_gpu": "auto", "zero_optimisation": {"stage": 2}}'
    )
    text = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n"
    path = tmp_path / "accelerate.yaml"
    path.write_text(text)
    assert main(["lint", str(path)]) == 1
    shown = capsys.readouterr()
    assert shown.out == f"ok {path}\n" and "error[SW4112]" in shown.err
    assert f"{tmp_path / 'ds.json'}:1" in shown.err
    path.write_text(text + "  zero_stage: 2\n")
    assert main(["lint", str(path)]) == 1
    assert "error[SW4013]: Accelerate refuses `deepspeed_config.zero_stage`" in (
        capsys.readouterr().err
    )


def test_what_accelerate_does_with_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its launcher hands the names of the section's keys to the plugin, which refuses them."""
    dataclasses = pytest.importorskip("accelerate.utils.dataclasses")
    plugin = dataclasses.DeepSpeedPlugin.__new__(dataclasses.DeepSpeedPlugin)
    monkeypatch.setenv("ACCELERATE_CONFIG_DS_FIELDS", "deepspeed_config_file,zero3_init_flag")
    plugin._deepspeed_config_checks()
    for name in ("zero_stage", "gradient_clipping", "offload_optimizer_device"):
        monkeypatch.setenv("ACCELERATE_CONFIG_DS_FIELDS", f"deepspeed_config_file,{name}")
        with pytest.raises(ValueError, match="will be ignored"):
            plugin._deepspeed_config_checks()


def test_the_cases_are_yaml() -> None:
    for name, (text, _, _) in OTHERS.items():
        if name.endswith((".yaml", ".yml")):
            node, errors = parse_recipe_text(text, LineOffsets(name, text))
            assert node is not None and not errors and isinstance(node_value(node), dict)

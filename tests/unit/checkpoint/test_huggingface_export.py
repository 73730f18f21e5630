"""What export reads is what the run wrote, what it writes has the rights of any new file, and it
needs no DeepSpeed."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from shardwright.checkpoint.huggingface_export import (
    drop_missing_tensors_from_config,
    export_checkpoint,
)
from shardwright.compile.compiled_folder import write_folder
from shardwright.compile.recipe_compiler import compile_recipe
from shardwright.diagnostics import Refusal
from shardwright.parallel.model_loading import load_config
from shardwright.plan.plan import read_plan
from shardwright.recipe.recipe_loader import load_recipe
from tests.conftest import SMALL_RECIPE
from tests.unit.checkpoint.written_checkpoints import write_model_checkpoint
from tests.zoo.configs import tiny_config


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("original")
    (root / "recipe.json").write_text(json.dumps(SMALL_RECIPE))
    write_folder(root / "out", compile_recipe(load_recipe(root / "recipe.json")).files)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(load_config(read_plan(root / "out"), root / "out"))
    return write_model_checkpoint(root / "out", dict(model.named_parameters()))


@pytest.fixture
def step(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / original.name))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-2] ^= 0x40  # in the exponent of the last float
    path.write_bytes(data)


WEIGHTS = "rank-00000-000.safetensors"
THREE = (WEIGHTS, "plan.json", "model/config.json")


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda step: flip(step / WEIGHTS), [WEIGHTS]),
        (lambda step: list(map(flip, map(step.joinpath, THREE))), [*THREE]),
        (lambda step: [(step / name).unlink() for name in (WEIGHTS, "plan.json")], [WEIGHTS, "plan.json"]),  # noqa: E501
        (lambda step: (step / "model" / "tokenizer.json").symlink_to("/etc/hostname"), ["model/tokenizer.json"]),  # noqa: E501
        (lambda step: (step / "model" / "generation_config.json").write_text("{}"), ["model/generation_config.json"]),  # noqa: E501
    ],
    ids=["a bit", "bits in three", "two missing", "a link to a secret", "a file that is in no list"],  # noqa: E501
)  # fmt: skip
def test_bytes_that_no_run_wrote_are_refused_by_name(
    damage: Callable[[Path], object], named: list[str], step: Path, tmp_path: Path
) -> None:
    before = set(tmp_path.iterdir())
    damage(step)
    with pytest.raises(Refusal) as caught:
        export_checkpoint(step, tmp_path / "hf")
    assert {d.code for d in caught.value.diagnostics} == {"SW6201"}
    told = [d.message for d in caught.value.diagnostics]
    assert len(told) == len(named) and all(any(name in line for line in told) for name in named)
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize("umask", [0o077, 0o027, 0o022])
def test_an_exports_rights_follow_the_umask(umask: int, step: Path, tmp_path: Path) -> None:
    old = os.umask(umask)
    try:
        export_checkpoint(step, tmp_path / "hf")
    finally:
        os.umask(old)
    rights = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "hf").iterdir()}
    assert stat.S_IMODE((tmp_path / "hf").stat().st_mode) == 0o777 & ~umask
    assert rights == {0o666 & ~umask}


def test_export_imports_no_deepspeed_and_says_nothing_else(step: Path, tmp_path: Path) -> None:
    code = (
        "import sys\nfrom shardwright.cli.main import main\ncode = main(sys.argv[1:])\n"
        "assert 'deepspeed' not in sys.modules\nsys.exit(code)"
    )
    command = [sys.executable, "-c", code, "export", str(step), "-o", str(tmp_path / "hf")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "" and len(done.stdout.splitlines()) == 1
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    torch.manual_seed(0)
    wanted = AutoModelForCausalLM.from_config(model.config)
    for (name, a), (_, b) in zip(model.named_parameters(), wanted.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_a_configuration_says_nothing_of_what_an_export_does_not_hold() -> None:
    """No quantised weights beside fp32 ones, no layers for multi-token prediction that were not
    loaded."""
    stored = {"quantization_config": {"quant_method": "fp8"}, "num_nextn_predict_layers": 1}
    config = AutoConfig.for_model(**{**tiny_config("deepseek_v3"), **stored})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    drop_missing_tensors_from_config(model)
    written = model.config.to_dict()
    assert "quantization_config" not in written and written["num_nextn_predict_layers"] == 0

"""Checkpoints of other programs are named by every command that meets one, with what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwright.checkpoint.checkpoint_compatibility import incomplete_checkpoint
from shardwright.cli.main import main
from shardwright.recipe.foreign_checkpoints import foreign_checkpoint_error
from shardwright.recipe.input_file_checks import _model_folder

FILES = {
    "DeepSpeed, ZeRO": ("latest", "global_step5/zero_pp_rank_0_mp_rank_00_optim_states.pt"),
    "DeepSpeed, of a pipeline": ("latest", "global_step5/layer_00-model_00-model_states.pt"),
    "DeepSpeed, in the universal format": (
        "latest_universal",
        "global_step5_universal/zero/w/fp32.pt",
    ),
    "DeepSpeed": ("latest", "global_step5/mp_rank_00_model_states.pt"),
    "the Hugging Face Trainer, with weights": (
        "trainer_state.json",
        "optimizer.pt",
        "model.safetensors",
    ),
    "the Hugging Face Trainer": ("checkpoint-5/trainer_state.json",),
    "Accelerate (save_state)": ("random_states_0.pkl", "optimizer.bin"),
    "Megatron-Core": ("latest_checkpointed_iteration.txt", "iter_0000005/.metadata"),
    "PyTorch's distributed checkpoints (FSDP, torchtitan)": (".metadata", "__0_0.distcp"),
    "peft (adapters alone)": ("adapter_config.json", "adapter_model.safetensors"),
}


@pytest.mark.parametrize("kind", FILES)
def test_it_is_named_by_its_files(kind: str, tmp_path: Path) -> None:
    for name in FILES[kind]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    told = foreign_checkpoint_error(tmp_path)
    assert (
        told is not None
        and told.code == "SW6220"
        and told.message.endswith(f": {kind}")
        and "{" not in told.message
    )
    assert [d.code for d in incomplete_checkpoint(tmp_path, "").diagnostics] == [
        "SW6220"
    ]  # run --resume and export
    assert [d.code for d in _model_folder(str(tmp_path))] == ["SW6220"]  # check


def test_the_commands_name_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ds" / "global_step5").mkdir(parents=True)
    (tmp_path / "ds" / "latest").touch()
    (tmp_path / "ds" / "global_step5" / "zero_pp_rank_0_mp_rank_00_optim_states.pt").touch()
    for folder in (tmp_path / "ds", tmp_path / "ds" / "global_step5"):
        for command in (
            ["export", str(folder), "-o", str(tmp_path / "hf")],
            ["generate", str(folder), "--prompt", "x"],
        ):
            assert main(command) == 1
            told = capsys.readouterr().err
            assert "SW6220" in told and f"zero_to_fp32 {tmp_path / 'ds'} " in told, command


def test_an_empty_folder_is_of_no_program(tmp_path: Path) -> None:
    assert foreign_checkpoint_error(tmp_path) is None
    assert [d.code for d in incomplete_checkpoint(tmp_path, "empty").diagnostics] == ["SW6201"]

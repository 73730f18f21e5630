"""`target: reference` through the commands: killed and resumed, exported, and its checkpoints under
DeepSpeed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from shardwright.utils.numeric_difference import (
    max_abs_diff,
    max_series_diff,
    state_dict_max_abs_diff,
)
from tests.launch.resume import same_numbers
from tests.parity.harness import (
    LOSS_ABSOLUTE,
    WEIGHT_ABSOLUTE,
    Case,
    metrics,
    must,
    newest_checkpoint,
    recipe,
    shardwright,
    write_inputs,
)

# Dropout: a run that resumes draws on where it was, and each engine draws what the other does.
CASE = Case(model="gpt2-dropout", zero_stage=0)
STEPS, EVERY, KILLED_IN = 8, 4, 6

_KILL = f"""
import os, signal
from pathlib import Path
from shardwright.parallel.micro_batches import TrainingBatches
_micro_batches = TrainingBatches.micro_batches
def _killed(self, step, data_rank):
    if step == {KILLED_IN}:
        os.kill(os.getpid(), signal.SIGKILL)
    return _micro_batches(self, step, data_rank)
TrainingBatches.micro_batches = _killed
"""


def compiled(target: str, folder: Path, name: str) -> Path:
    write_inputs(CASE, folder)
    document = {**recipe(CASE, folder), "target": target, "checkpoint": {"every_steps": EVERY}}
    (folder / "recipe.yaml").write_text(json.dumps(document))
    must(shardwright("compile", folder / "recipe.yaml", "-o", folder / name))
    return folder / name


def exported(out: Path, to: Path) -> Any:
    must(shardwright("export", newest_checkpoint(out), "-o", to))
    return AutoModelForCausalLM.from_pretrained(to, dtype=torch.float32).eval()


def losses(out: Path, first: int = 1) -> list[float]:
    return [m["loss"] for m in metrics(out) if m["step"] >= first]


@pytest.mark.launch
def test_trains_resumes_and_exports_as_deepspeed_does(tmp_path: Path) -> None:
    whole = compiled("reference", tmp_path, "whole")
    assert (
        not (whole / "ds_config.json").exists()
        and "deepspeed" not in (whole / "launch.sh").read_text()
    )
    must(shardwright("run", whole))
    wanted = metrics(whole)
    assert [m["step"] for m in wanted] == list(range(1, STEPS + 1))
    killed = tmp_path / "killed"
    shutil.copytree(whole, killed, ignore=shutil.ignore_patterns("run", "checkpoints"))
    script = (killed / "train.py").read_text()
    (killed / "train.py").write_text(_KILL + script.split('"""', 2)[2])
    assert shardwright("run", killed).returncode == 3
    assert [path.name for path in (killed / "checkpoints").glob("step-*")] == [f"step-{EVERY:08d}"]
    (killed / "train.py").write_text(script)
    must(shardwright("run", killed))
    assert same_numbers(metrics(killed), wanted)
    assert {m["attempt"] for m in metrics(killed)} == {1, 2}

    other = compiled("deepspeed", tmp_path, "deepspeed")
    must(shardwright("run", other))
    assert max_series_diff(losses(whole), losses(other)) <= LOSS_ABSOLUTE
    ours, theirs = exported(killed, tmp_path / "ours"), exported(other, tmp_path / "theirs")
    assert (
        state_dict_max_abs_diff(dict(ours.named_parameters()), dict(theirs.named_parameters()))
        <= WEIGHT_ABSOLUTE
    )
    ids = torch.arange(CASE.batch * 16).view(CASE.batch, 16)
    with torch.no_grad():
        assert max_abs_diff(ours(ids).logits, theirs(ids).logits) <= 1e-4

    straight = losses(whole, EVERY + 1)
    for out, source in ((whole, other), (other, whole)):
        moved = tmp_path / f"from-{source.name}" / f"step-{EVERY:08d}"
        shutil.copytree(source / "checkpoints" / moved.name, moved)
        must(shardwright("run", out, "--resume", moved))
        assert max_series_diff(losses(out, EVERY + 1), straight) <= LOSS_ABSOLUTE

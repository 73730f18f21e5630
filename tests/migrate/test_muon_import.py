"""`import` of DeepSpeed's and Megatron-LM's Muon into a recipe's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwright.migrate.config_import import convert_config
from shardwright.migrate.recipe_draft import RecipeDraft

KEY = "training.optimizer"


def deepspeed_draft(folder: Path, **params: Any) -> RecipeDraft:
    document = {
        "train_batch_size": 8,
        "optimizer": {"type": "Muon", "params": params},
        "zero_optimization": {"stage": 1},
    }
    (folder / "ds.json").write_text(json.dumps(document))
    launch = "deepspeed --num_gpus 8 train.py"
    return convert_config(str(folder / "ds.json"), launch, None, str(folder)).draft


def megatron_draft(options: str) -> RecipeDraft:
    command = (
        "torchrun --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size 1 "
        "--num-layers 4 --micro-batch-size 1 --global-batch-size 8 --lr 0.02 --optimizer muon "
    )
    return convert_config(None, command + options, None, "/").draft


def found(draft: RecipeDraft) -> dict[str, Any]:
    names = ("name", "lr", "adamw_lr", "momentum", "ns_steps", "weight_decay", "betas", "eps")
    return {name: draft.values.get(f"{KEY}.{name}") for name in names}


def test_deepspeeds_own_rates(tmp_path: Path) -> None:
    draft = deepspeed_draft(
        tmp_path, lr=1e-3, muon_lr=0.01, momentum=0.9, betas=[0.8, 0.9], eps=1e-9, weight_decay=0.2
    )
    assert found(draft) == {
        "name": "muon",
        "lr": 0.01,
        "adamw_lr": 1e-3,
        "momentum": 0.9,
        "ns_steps": 5,
        "weight_decay": 0.2,
        "betas": [0.8, 0.9],
        "eps": 1e-9,
    }
    assert any("clips the orthogonalized update" in note for note in draft.notes[KEY])


def test_deepspeeds_defaults(tmp_path: Path) -> None:
    values = found(deepspeed_draft(tmp_path))
    assert (values["lr"], values["adamw_lr"], values["momentum"]) == (0.02, 3e-4, 0.95)
    assert (values["betas"], values["eps"], values["weight_decay"]) == ([0.9, 0.95], 1e-10, 0.0)


def test_a_rate_that_is_no_number_is_asked_for(tmp_path: Path) -> None:
    draft = deepspeed_draft(tmp_path, muon_lr="auto", adam_lr=1e-4, ns_method="standard")
    assert "muon_lr" in draft.fill[f"{KEY}.lr"] and f"{KEY}.adamw_lr" not in draft.fill
    assert "optimizer.params.ns_method" in draft.left


def test_megatrons_options_of_the_same_muon() -> None:
    draft = megatron_draft(
        "--muon-momentum 0.95 --muon-nesterov --muon-num-ns-steps 6 --muon-scale-mode shape_scaling"
        " --muon-coefficient-type simple --muon-tp-mode duplicated --weight-decay 0.1"
    )
    values = found(draft)
    assert (values["name"], values["lr"], values["adamw_lr"]) == ("muon", 0.02, 0.02)
    assert (values["momentum"], values["ns_steps"], values["weight_decay"]) == (0.95, 6, 0.1)
    assert f"{KEY}.lr" not in draft.fill


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("--muon-nesterov --muon-coefficient-type simple", "--muon-scale-mode spectral"),
        ("--muon-nesterov --muon-scale-mode shape_scaling", "--muon-coefficient-type quintic"),
        ("--muon-scale-mode shape_scaling --muon-coefficient-type simple", "--muon-nesterov"),
        (
            "--muon-nesterov --muon-scale-mode shape_scaling --muon-coefficient-type simple "
            "--muon-extra-scale-factor 0.2",
            "0.2: multiply the matrices' rate by it",
        ),
    ],
)
def test_megatrons_options_of_another_muon_leave_the_rate_to_the_user(
    options: str, why: str
) -> None:
    draft = megatron_draft(options)
    assert why in draft.fill[f"{KEY}.lr"]
    assert draft.values[f"{KEY}.adamw_lr"] == 0.02 and draft.values[f"{KEY}.momentum"] == 0.9

"""A run that goes on under another layout: through the commands, and every layout on every
other."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from shardwright.utils.numeric_difference import max_series_diff, state_dict_max_abs_diff
from tests.launch.resume_matrix import all_pairs, resumed, wide_pairs
from tests.parity.harness import (
    WEIGHT_ABSOLUTE,
    Case,
    metrics,
    must,
    newest_checkpoint,
    recipe,
    shardwright,
    write_inputs,
)

TOLERANCE = 1e-5
SAMPLE = [("gpt2 pp2", "gpt2 zero3-dp2"), ("gpt2 zero3-dp2", "gpt2 tp2"), ("gpt2 tp2", "gpt2 pp2")]


@pytest.mark.launch
def test_recompiled_for_another_layout_the_run_goes_on_by_itself(tmp_path: Path) -> None:
    """Pipeline 2 x tensor 2 for four steps, then ZeRO-3 on two ranks for two, then one rank to the
    end."""
    layouts = [
        (4, Case(model="gpt2", pipeline=2, tensor=2, accumulation=4)),
        (6, Case(model="gpt2", data=2, zero_stage=3)),
        (8, Case(model="gpt2", accumulation=4)),
    ]
    out = tmp_path / "out"
    write_inputs(layouts[0][1], tmp_path)
    for steps, case in layouts:
        document = recipe(case, tmp_path)
        document["training"]["steps"] = steps
        document["training"]["scheduler"] = {"name": "constant", "warmup_steps": 2}
        (tmp_path / "recipe.yaml").write_text(json.dumps(document))
        must(shardwright("compile", tmp_path / "recipe.yaml", "-o", out))
        said = must(shardwright("run", out)).stdout
        assert ("was written under another layout" in said) == (steps > 4)
    must(shardwright("export", newest_checkpoint(out), "-o", tmp_path / "changed"))
    lines = metrics(out)
    assert [m["step"] for m in lines] == list(range(1, 9))
    assert [m["attempt"] for m in lines] == [1] * 4 + [2] * 2 + [3] * 2

    must(shardwright("compile", tmp_path / "recipe.yaml", "-o", tmp_path / "whole"))
    must(shardwright("run", tmp_path / "whole"))
    must(shardwright("export", newest_checkpoint(tmp_path / "whole"), "-o", tmp_path / "hf"))
    losses, wanted = ([m["loss"] for m in found] for found in (lines, metrics(tmp_path / "whole")))
    assert max_series_diff(losses, wanted) <= TOLERANCE
    changed, plain = (
        load_file(tmp_path / name / "model.safetensors") for name in ("changed", "hf")
    )
    assert state_dict_max_abs_diff(changed, plain) <= WEIGHT_ABSOLUTE


@pytest.mark.prove
@pytest.mark.launch
def test_a_sample_of_the_matrix(tmp_path: Path) -> None:
    differences = resumed(SAMPLE, tmp_path)
    assert max(differences.values()) <= TOLERANCE, differences


@pytest.mark.prove
@pytest.mark.launch
def test_context_ranks_resume_and_are_resumed(tmp_path: Path) -> None:
    """Under another context degree, and under none."""
    pairs = [
        ("llama s2", "llama tp2"),
        ("llama tp2", "llama s2-zero3"),
        ("llama s2-zero3", "llama s2"),
    ]
    differences = resumed(pairs, tmp_path)
    assert set(differences) == set(pairs)
    assert max(differences.values()) <= TOLERANCE, differences


@pytest.mark.prove
@pytest.mark.launch
def test_expert_ranks_resume_and_are_resumed(tmp_path: Path) -> None:
    """Under another expert degree, under context ranks, and under none."""
    pairs = [
        ("mixtral e2", "mixtral tp2"),
        ("mixtral tp2", "mixtral e2-zero3"),
        ("mixtral e2-zero3", "mixtral s2-e2"),
    ]
    differences = resumed(pairs, tmp_path)
    assert set(differences) == set(pairs)
    assert max(differences.values()) <= TOLERANCE, differences


@pytest.mark.prove
@pytest.mark.launch
def test_expert_ranks_resume_on_wider_layouts(tmp_path: Path) -> None:
    pairs = [
        ("mixtral e2-tp2", "mixtral e2"),
        ("mixtral e2", "mixtral e2-pp2"),
        ("mixtral e2-pp2", "mixtral e2-tp2"),
    ]
    differences = resumed(pairs, tmp_path)
    assert set(differences) == set(pairs)
    assert max(differences.values()) <= TOLERANCE, differences


@pytest.mark.prove
@pytest.mark.launch
def test_every_layout_resumes_on_every_other(
    tmp_path: Path, proved: Callable[[str, str, dict[str, Any]], None]
) -> None:
    differences = resumed(all_pairs(), tmp_path)
    assert len(differences) == 112
    for (source, target), difference in differences.items():
        proved("resume-matrix", f"{source} -> {target.split()[1]}", {"loss_absolute": difference})
    assert max(differences.values()) <= TOLERANCE, differences


@pytest.mark.prove
@pytest.mark.launch
def test_every_wide_layout_resumes_on_three_others(
    tmp_path: Path, proved: Callable[[str, str, dict[str, Any]], None]
) -> None:
    differences = resumed(wide_pairs(), tmp_path)
    assert len(differences) == 48
    for (source, target), difference in differences.items():
        proved("resume-matrix", f"{source} -> {target.split()[1]}", {"loss_absolute": difference})
    assert max(differences.values()) <= TOLERANCE, differences

"""LoRA trains as one plain process under peft does; its checkpoints resume bit for bit and export
what peft loads."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from shardwright.checkpoint.checkpoint_loader import CheckpointReader
from shardwright.utils.numeric_difference import (
    difference,
    max_abs_diff,
    max_series_diff,
    state_dict_max_abs_diff,
)
from tests.figures import lines_apart, same
from tests.parity.case_launches import launched
from tests.parity.harness import (
    LORA_ALPHA,
    LOSS_ABSOLUTE,
    NORM_RELATIVE,
    SEED,
    STEPS,
    WEIGHT_ABSOLUTE,
    Case,
    check_half_precision,
    metrics,
    must,
    newest_checkpoint,
    reference,
    shardwright,
    write_inputs,
)
from tests.parity.models import MIXTURES, MODELS
from tests.parity.reference import initial_model

pytestmark = pytest.mark.launch

_KEYS: dict[str, dict[str, Any]] = {
    "zero0": {"zero_stage": 0},
    "zero1": {"zero_stage": 1},
    "zero2": {"zero_stage": 2},
    "zero3": {"zero_stage": 3},
    "full-zero1": {"zero_stage": 1, "checkpointing": "full"},
    "full-zero3": {"zero_stage": 3, "checkpointing": "full"},
    "chunked-zero2": {"zero_stage": 2, "loss": "chunked"},
    "chunked-zero3": {"zero_stage": 3, "loss": "chunked"},
}
CASES: dict[str, Case] = {
    f"{model} {name}": dataclasses.replace(Case(model=model, data=2, lora_rank=4), **fields)
    for model in ("llama", "gpt2", "llama-tied", "qwen2", *MIXTURES)
    for name, fields in _KEYS.items()
}
SAMPLE = (
    "llama zero0",
    "gpt2 zero1",
    "llama-tied full-zero3",
    "qwen2 chunked-zero2",
    "deepseek_v3 zero1",
)


def check(name: str, figures: dict[str, Any]) -> None:
    assert figures["loss"] <= LOSS_ABSOLUTE, (name, figures)
    assert figures["norm"] <= NORM_RELATIVE, (name, figures)


def test_adapters_train_as_under_peft(tmp_path: Path) -> None:
    for name, figures in launched({name: CASES[name] for name in SAMPLE}, tmp_path).items():
        check(name, figures)


@pytest.mark.prove
def test_every_zero_stage(
    tmp_path: Path, proved: Callable[[str, str, dict[str, Any]], None]
) -> None:
    for name, figures in launched(CASES, tmp_path).items():
        proved("lora", name, figures)
        check(name, figures)


def trained_lines(case: Case, folder: Path) -> list[dict[str, Any]]:
    must(shardwright("compile", folder / "recipe.yaml", "-o", folder / "out"))
    must(shardwright("run", folder / "out"))
    return metrics(folder / "out")


@pytest.mark.prove
def test_dropout_is_drawn_as_in_one_process(tmp_path: Path) -> None:
    case = Case(model="llama", data=2, zero_stage=2, lora_rank=4, lora_dropout=0.2)
    tokens = write_inputs(case, tmp_path)
    wanted, never = (
        reference(case, tokens),
        reference(dataclasses.replace(case, lora_dropout=0.0), tokens),
    )
    check("dropout", lines_apart(trained_lines(case, tmp_path), wanted))
    effect = difference(wanted.losses[-1], never.losses[-1])
    assert 10 * LOSS_ABSOLUTE < effect < math.inf, "dropout makes a difference"


@pytest.mark.prove
@pytest.mark.parametrize("stage", [1, 3])
def test_half_precision(stage: int, tmp_path: Path) -> None:
    case = Case(model="llama", data=2, zero_stage=stage, lora_rank=4, precision="bf16")
    tokens = write_inputs(case, tmp_path)
    lines = trained_lines(case, tmp_path)
    check_half_precision(lines, reference(case, tokens), reference(case, tokens, torch.bfloat16))


def test_checkpoints_resume_and_export(tmp_path: Path) -> None:
    """GPT-2, whose weights lie the other way round, at ZeRO-3, which shares them out."""
    case = Case(model="gpt2", data=2, zero_stage=3, lora_rank=4, pretrained=True)
    tokens = write_inputs(case, tmp_path)
    recipe = json.loads((tmp_path / "recipe.yaml").read_text()) | {"checkpoint": {"every_steps": 3}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    out = tmp_path / "out"
    must(shardwright("compile", tmp_path / "recipe.yaml", "-o", out))
    must(shardwright("run", out))
    first, steps = metrics(out), {path.name: path for path in (out / "checkpoints").iterdir()}
    trained = load_file(newest_checkpoint(out) / "rank-00000-000.safetensors")

    must(shardwright("run", out, "--resume", steps["step-00000003"]))
    again = metrics(out)
    assert same([m["loss"] for m in again], [m["loss"] for m in first])
    resumed = load_file(newest_checkpoint(out) / "rank-00000-000.safetensors")
    assert state_dict_max_abs_diff(resumed, trained) == 0

    plan = json.loads((out / "plan.json").read_text())
    for rank in plan["ranks"]:
        live = json.loads((out / "run" / "ranks" / f"rank-{rank['rank']:05d}.json").read_text())
        assert live["parameter_bytes"] == rank["parameter_bytes"]

    must(shardwright("export", newest_checkpoint(out), "-o", tmp_path / "adapters"))
    must(shardwright("export", newest_checkpoint(out), "-o", tmp_path / "merged", "--merge"))
    difference = AutoPeftModelForCausalLM.from_pretrained(
        tmp_path / "adapters", dtype=torch.float32
    )
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "weights", dtype=torch.float32)
    ids = torch.from_numpy(tokens[:2].astype("int64"))
    with torch.no_grad():
        logits = [model.eval()(input_ids=ids).logits for model in (difference, merged, base)]
    assert max_abs_diff(logits[0], logits[1]) <= 1e-5
    assert 1e-3 < max_abs_diff(logits[0], logits[2]) < math.inf
    wanted = reference(case, tokens)
    check("from a checkpoint", lines_apart(first, wanted))
    assert len(first) == STEPS
    adapters = {n.replace(".default", ""): p for n, p in wanted.weights.items() if "lora_" in n}
    assert (
        state_dict_max_abs_diff(
            load_file(tmp_path / "adapters" / "adapter_model.safetensors"), adapters
        )
        <= WEIGHT_ABSOLUTE
    )


@pytest.mark.prove
@pytest.mark.parametrize(
    ("model", "stage", "second"),
    [
        ("deepseek_v3", 3, {"data": 1, "zero_stage": 0}),
        *(
            pytest.param(
                model, stage, {"data": 2, "zero_stage": (stage + 2) % 4}, marks=pytest.mark.prove
            )
            for model in MIXTURES
            for stage in range(4)
        ),
    ],
)
def test_a_mixture_resumes_and_merges(
    model: str, stage: int, second: dict[str, Any], tmp_path: Path
) -> None:
    """On its own layout bit for bit, on another one within the rounding; merged by hand: W + alpha
    / r B A."""
    case = Case(model=model, data=2, zero_stage=stage, lora_rank=4, pretrained=True)
    tokens = write_inputs(case, tmp_path)
    recipe = json.loads((tmp_path / "recipe.yaml").read_text()) | {"checkpoint": {"every_steps": 3}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    other = {
        **recipe,
        "cluster": {**recipe["cluster"], "gpus_per_node": second["data"]},
        "parallelism": {
            **recipe["parallelism"],
            **second,
            "micro_batch_size": case.batch // second["data"] // 2,
        },
    }
    (tmp_path / "second.yaml").write_text(json.dumps(other))
    out, elsewhere = tmp_path / "out", tmp_path / "second"
    must(shardwright("compile", tmp_path / "recipe.yaml", "-o", out))
    must(shardwright("compile", tmp_path / "second.yaml", "-o", elsewhere))
    must(shardwright("run", out))
    first, trained = metrics(out), adapters_of(newest_checkpoint(out))
    wanted = reference(case, tokens)
    check(model, lines_apart(first, wanted))
    assert (
        state_dict_max_abs_diff(trained, {n: p for n, p in wanted.weights.items() if ".lora_" in n})
        <= WEIGHT_ABSOLUTE
    )
    for rank in range(2):
        live = json.loads((out / "run" / "ranks" / f"rank-{rank:05d}.json").read_text())
        assert live["trained"]["tensors"] == len(trained)
        assert live["frozen"]["tensors"] == len(wanted.weights) - len(trained)

    must(shardwright("export", newest_checkpoint(out), "-o", tmp_path / "merged", "--merge"))
    found = dict(
        AutoModelForCausalLM.from_pretrained(
            tmp_path / "merged", dtype=torch.float32
        ).named_parameters()
    )
    merged = {
        name: p.detach().clone()
        for name, p in initial_model(MODELS[model], SEED).named_parameters()
    }
    for name in (n.removesuffix(".lora_A.default.weight") for n in trained if ".lora_A." in n):
        a, b = (trained[f"{name}.lora_{x}.default.weight"] for x in "AB")
        merged[f"{name}.weight"] += LORA_ALPHA / 4 * b @ a
    assert state_dict_max_abs_diff(found, merged) <= 1e-6
    experts = [name for name in found if ".experts." in name]
    assert experts and any("shared_expert" in n or ".layers.0.mlp." in n for n in trained)

    for folder in (out, elsewhere):
        must(shardwright("run", folder, "--resume", out / "checkpoints" / "step-00000003"))
    again, there = metrics(out), metrics(elsewhere)
    assert same([m["loss"] for m in again], [m["loss"] for m in first])
    assert state_dict_max_abs_diff(adapters_of(newest_checkpoint(out)), trained) == 0
    assert (
        max_series_diff([m["loss"] for m in there[-5:]], [m["loss"] for m in first[-5:]])
        <= LOSS_ABSOLUTE
    )
    assert (
        state_dict_max_abs_diff(adapters_of(newest_checkpoint(elsewhere)), trained)
        <= WEIGHT_ABSOLUTE
    )


def adapters_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    with CheckpointReader(checkpoint) as reader:
        return {
            name: reader.whole(name, "fp32") for name in reader.manifest.tensors if ".lora_" in name
        }

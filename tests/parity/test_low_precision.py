"""Linears in FP8, emulated by torchao, train as one plain process that rounds the same.

Row-wise scales are powers of two, which no layout changes. Tensor-wise scales are of a rank's own
part: the plain process takes a micro-batch at a time, and scales a linear in the ranks' parts.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from shardwright.utils.numeric_difference import difference, state_dict_max_abs_diff
from tests.parity.case_launches import launched, sample_of
from tests.parity.harness import (
    Case,
    metrics,
    must,
    newest_checkpoint,
    shardwright,
    write_inputs,
)

MOST = {"loss": 1e-5, "norm": 1e-4, "weight": 1e-5}
ANY = {"loss": 1e-4, "norm": 1e-2, "weight": 1e-3}
"""Limits in steps in which a number is on the other side of a rounding boundary: FP8's steps are 6
to 12 %."""
ROWWISE, TENSORWISE = "fp8_rowwise", "fp8_tensorwise"
CASES = {
    **{
        f"{model}-{name}": Case(model=model, low_precision=ROWWISE, **layout)  # type: ignore[arg-type]
        for model, layouts in {
            "llama": ("tensor2", "pipeline2", "zero1", "zero2", "zero3", "context2"),
            "gpt2": ("tensor2", "pipeline2", "zero1", "zero3"),
            "qwen3_moe": ("tensor2", "pipeline2", "expert2", "zero3"),
        }.items()
        for name, layout in {
            "tensor2": {"tensor": 2, "zero_stage": 0},
            "pipeline2": {"pipeline": 2},
            "context2": {"context": 2},
            "expert2": {"data": 2, "expert": 2},
            **{f"zero{stage}": {"data": 2, "zero_stage": stage} for stage in (1, 2, 3)},
        }.items()
        if name in layouts
    },
    "tensorwise-zero1": Case(model="llama", data=2, low_precision=TENSORWISE),
    "tensorwise-zero3": Case(model="llama", data=2, zero_stage=3, low_precision=TENSORWISE),
    "tensorwise-tensor2": Case(model="llama", tensor=2, low_precision=TENSORWISE),
    "tensorwise-pipeline2": Case(model="gpt2", pipeline=2, low_precision=TENSORWISE),
    "full": Case(model="llama", data=2, checkpointing="full", zero_stage=3, low_precision=ROWWISE),
    "selective": Case(model="llama", tensor=2, checkpointing="selective", low_precision=ROWWISE),
    "compiled": Case(model="llama", data=2, kernels="compile", low_precision=ROWWISE),
    "compiled-pipeline": Case(model="llama", pipeline=2, kernels="compile", low_precision=ROWWISE),
    "kept": Case(
        model="llama",
        data=2,
        low_precision=ROWWISE,
        low_precision_keep=("model.layers.0.*", "*.down_proj"),
    ),
}


SAMPLE = sample_of(
    CASES, "llama-tensor2", "llama-zero3", "qwen3_moe-expert2", "tensorwise-pipeline2", "kept"
)


@pytest.mark.launch
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(SAMPLE, id="sample"),
        pytest.param(CASES, id="all", marks=pytest.mark.prove),
    ],
)
def test_low_precision_trains_as_one_plain_process(cases: dict[str, Case], tmp_path: Path) -> None:
    for name, figures in launched(cases, tmp_path, "low_precision_worker.py").items():
        for key in MOST:
            assert figures[f"{key} of most steps"] <= MOST[key], (name, figures)
            assert figures[f"{key} of any step"] <= ANY[key], (name, figures)


@pytest.mark.prove
@pytest.mark.launch
def test_a_run_in_fp8_goes_on_in_another_layout_and_without_it(tmp_path: Path) -> None:
    """The commands: ranks count what they convert, and FP8 is really used."""
    here = Case(model="llama", data=2, low_precision=ROWWISE)
    there = Case(model="llama", pipeline=2, micro=4, low_precision=ROWWISE)
    plain = Case(model="llama", data=2)
    losses: dict[str, list[float]] = {}
    for name, case in {"here": here, "there": there, "plain": plain}.items():
        folder = tmp_path / name
        write_inputs(case, folder)
        document = json.loads((folder / "recipe.yaml").read_text())
        document["checkpoint"] = {"every_steps": 4}
        (folder / "recipe.yaml").write_text(json.dumps(document))
        must(shardwright("compile", folder / "recipe.yaml", "-o", folder / "out"))
        first = tmp_path / "here" / "out" / "checkpoints" / "step-00000004"
        resume = () if name == "here" else ("--resume", first)
        must(shardwright("run", folder / "out", *resume))
        losses[name] = [m["loss"] for m in metrics(folder / "out")][-4:]
        ranks = [
            json.loads(path.read_text()) for path in (folder / "out" / "run" / "ranks").iterdir()
        ]
        counts = [rank.get("low_precision", {"tensors": 0})["tensors"] for rank in ranks]
        assert counts == {"here": [28, 28], "there": [14, 14], "plain": [0, 0]}[name]
    apart = {name: difference(losses["here"][0], losses[name][0]) for name in ("there", "plain")}
    assert apart["there"] <= MOST["loss"] < 1e-4 < apart["plain"], losses
    must(
        shardwright("export", newest_checkpoint(tmp_path / "there" / "out"), "-o", tmp_path / "hf")
    )
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    assert {p.dtype for p in exported.parameters()} == {torch.float32}
    here_at = newest_checkpoint(tmp_path / "here" / "out")
    must(shardwright("export", here_at, "-o", tmp_path / "hf-here"))
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "hf-here", dtype=torch.float32)
    assert (
        state_dict_max_abs_diff(dict(exported.named_parameters()), dict(other.named_parameters()))
        <= ANY["weight"]
    )

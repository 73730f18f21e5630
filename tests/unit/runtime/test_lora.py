"""LoRA's refusals, and a merge."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import pytest
import torch

from shardwright.diagnostics import Refusal
from shardwright.plan.plan import Plan, PlanLora
from shardwright.plan.serialize import plan_to_json, read_plan
from shardwright.runtime.checkpoint_index import check_fits
from shardwright.runtime.lora import merged
from shardwright.runtime.preconditions import check_machine

CASE = Path(__file__).parents[2] / "cases" / "qwen2-tp2-zero3" / "expected"
LORA = PlanLora(rank=4, alpha=8, dropout=0.0, target_modules=("q_proj", "v_proj"))


def plan(lora: PlanLora | None) -> Plan:
    return dataclasses.replace(read_plan(CASE), lora=lora)


def codes(refused: pytest.ExceptionInfo[Refusal]) -> list[str]:
    return [d.code for d in refused.value.diagnostics]


def test_without_peft_a_run_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "peft" else found(name, *a))
    with pytest.raises(Refusal) as refused:
        check_machine(plan(LORA), tmp_path, None)
    (absent,) = [d for d in refused.value.diagnostics if d.code == "SW6251"]
    assert "pip install" in absent.help
    try:
        check_machine(plan(None), tmp_path, None)
    except Refusal as other:
        assert all(d.code != "SW6251" for d in other.diagnostics)


@pytest.mark.parametrize("here", [None, dataclasses.replace(LORA, alpha=16), dataclasses.replace(LORA, rank=8)])
def test_a_checkpoint_of_other_adapters(here: PlanLora | None, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(plan_to_json(plan(LORA)))
    assert check_fits(plan(LORA), tmp_path, tmp_path) == ()
    with pytest.raises(Refusal) as refused:
        check_fits(plan(here), tmp_path, tmp_path)
    assert codes(refused) == ["SW6254"]


@pytest.mark.parametrize("turned", [False, True])
def test_a_merge(turned: bool) -> None:
    weight, a, b, x = torch.randn(6, 5), torch.randn(4, 5), torch.randn(6, 4), torch.randn(3, 5)
    wanted = x @ weight.t() + 2.0 * (x @ a.t()) @ b.t()
    whole = merged(weight.t() if turned else weight, a, b, LORA, turned=turned)
    assert torch.allclose(x @ (whole if turned else whole.t()), wanted, atol=1e-5)

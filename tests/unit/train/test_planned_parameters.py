"""What a rank holds, trains and freezes is compared with the plan, by name, shape and number."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from shardwright.diagnostics import Refusal
from shardwright.engines.trainer_protocol import ParameterShard
from shardwright.plan.plan import Plan, PlanLora, read_plan
from shardwright.train.training_session import check_parameters, planned_parameters, rank_record

CASES = Path(__file__).parents[2] / "cases"
NORM, FREEZABLE = "model.norm.weight", "model.layers.*.mlp.up_proj.weight"


def plan(case: str, *, frozen: tuple[str, ...] = (), lora: PlanLora | None = None) -> Plan:
    found = read_plan(CASES / case / "expected")
    return dataclasses.replace(
        found, model=dataclasses.replace(found.model, frozen=frozen), lora=lora
    )


def held(plan: Plan, rank: int) -> dict[str, ParameterShard]:
    planned = planned_parameters(plan, rank, frozenset())
    return {
        n: ParameterShard(shape=p.shape, resident_bytes=4, is_trained=p.is_trained)
        for n, p in planned.items()
    }


def test_stages_share_out_the_parameters_and_tensor_ranks_cut_them() -> None:
    p = plan("llama-pp2-tp2")
    names = [set(held(p, r.rank)) for r in p.ranks if r.tensor == 0]
    every = {q.name for module in p.tensor_parallel.modules for q in module.parameters}
    assert len(names) == 2 and not names[0] & names[1] and names[0] | names[1] == every
    shapes = {q.name: q.shape for module in p.tensor_parallel.modules for q in module.parameters}
    cut = [shape for name, q in held(p, 0).items() if (shape := q.shape) != shapes[name]]
    assert len(cut) >= len(names[0]) / 2


def test_a_tied_head_is_planned_by_the_first_name() -> None:
    p = plan("gpt2-tied-pp2-dp2")
    last = next(r.rank for r in p.ranks if r.pipeline == 1)
    assert "transformer.wte.weight" in held(p, last)
    renamed = {
        ("lm_head.weight" if n == "transformer.wte.weight" else n): q
        for n, q in held(p, last).items()
    }
    check_parameters(p, last, renamed, frozenset())


def test_frozen_parameters_and_adapters_are_planned() -> None:
    frozen = {
        n
        for n, q in held(plan("qwen2-tp2-zero3", frozen=(FREEZABLE,)), 0).items()
        if not q.is_trained
    }
    assert frozen and all(n.endswith("mlp.up_proj.weight") for n in frozen)
    lora = PlanLora(rank=4, alpha=8, dropout=0.0, target_modules=("q_proj",))
    adapted = held(plan("qwen2-tp2-zero3", lora=lora), 0)
    assert (
        {n for n, q in adapted.items() if q.is_trained}
        == {n for n in adapted if "lora_" in n}
        != set()
    )


@pytest.mark.parametrize("fault", ["absent", "other", "frozen", "shape"])
def test_another_rank_than_planned_is_refused(fault: str) -> None:
    p = plan("qwen2-tp2-zero3")
    right = held(p, 1)
    check_parameters(p, 1, right, frozenset())
    wrong = dict(right)
    if fault == "absent":
        del wrong[NORM]
    if fault == "other":
        wrong["model.extra.weight"] = wrong[NORM]
    if fault == "frozen":
        wrong[NORM] = dataclasses.replace(wrong[NORM], is_trained=False)
    if fault == "shape":
        wrong[NORM] = dataclasses.replace(wrong[NORM], shape=(1, 2, 3))
    with pytest.raises(Refusal, match="rank 1: 1 of") as refused:
        check_parameters(p, 1, wrong, frozenset())
    (told,) = refused.value.diagnostics
    assert (
        told.code == "SW6259"
        and ("extra" if fault == "other" else NORM) in told.message
        and "planned" in told.message
    )


def test_the_record_of_a_rank_counts() -> None:
    p = plan("qwen2-tp2-zero3", frozen=(NORM,))
    record = rank_record(held(p, 0), 0)
    assert record["frozen"] == {"tensors": 1, "elements": held(p, 0)[NORM].shape[0]}
    assert record["trained"]["tensors"] == len(held(p, 0)) - 1  # type: ignore[index,call-overload]

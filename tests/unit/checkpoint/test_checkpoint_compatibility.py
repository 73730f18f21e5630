"""What a run hears of a checkpoint that another plan wrote: refused, warned of, or only told."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest

from shardwright.checkpoint.checkpoint_compatibility import check_resumable, same_sharding
from shardwright.diagnostics import Refusal
from shardwright.plan.plan import Plan, PlanLora, plan_from_json, plan_to_json, read_plan


@pytest.fixture
def plan(compiled: Path) -> Plan:
    return read_plan(compiled)


def notes(now: Plan, saved: Plan, compiled: Path, tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "step-00000004").mkdir(exist_ok=True)
    (tmp_path / "step-00000004" / "plan.json").write_text(plan_to_json(saved))
    return check_resumable(now, compiled, tmp_path / "step-00000004")


def changed(plan: Plan, section: str, **values: Any) -> Plan:
    return dataclasses.replace(
        plan, **{section: dataclasses.replace(getattr(plan, section), **values)}
    )


def test_the_same_plan_is_no_news(plan: Plan, compiled: Path, tmp_path: Path) -> None:
    assert notes(plan, plan, compiled, tmp_path) == ()


@pytest.mark.parametrize("key", ["global_batch_size", "sequence_length", "seed"])
def test_other_samples_are_warned_of(key: str, plan: Plan, compiled: Path, tmp_path: Path) -> None:
    """A step's number stands for the samples before it."""
    (note,) = notes(changed(plan, "training", **{key: 1237}), plan, compiled, tmp_path)
    assert (
        note.startswith("warning[SW6207]")
        and f"training.{key} {getattr(plan.training, key)} -> 1237" in note
    )


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("strategy", "tensor", 4),
        ("strategy", "pipeline", 4),
        ("strategy", "data", 2),
        ("strategy", "zero_stage", 3),
        ("strategy", "schedule", "dualpipev"),
        ("strategy", "offload", "optimizer"),
        ("training", "precision", "bf16"),
    ],
)
def test_another_layout_is_told(
    section: str, key: str, value: object, plan: Plan, compiled: Path, tmp_path: Path
) -> None:
    before = getattr(getattr(plan, section), key)
    (note,) = notes(changed(plan, section, **{key: value}), plan, compiled, tmp_path)
    assert note == f"step-00000004 was written under another layout: {key} {before} -> {value}"


def test_who_has_the_same_layers_and_shards(plan: Plan, compiled: Path, tmp_path: Path) -> None:
    assert same_sharding(plan, plan) and same_sharding(
        changed(plan, "strategy", zero_stage=3), plan
    )
    for keys in ({"tensor": 4}, {"pipeline": 4}, {"data": 2}, {"schedule": "dualpipev"}):
        assert not same_sharding(changed(plan, "strategy", **keys), plan)
    first, second = plan.stages
    stages = (
        dataclasses.replace(first, layers=first.layers[:-1]),
        dataclasses.replace(
            second, first_layer=second.first_layer - 1, layers=(first.layers[-1], *second.layers)
        ),
    )
    moved = dataclasses.replace(plan, stages=stages)
    assert not same_sharding(moved, plan)
    assert "stage boundaries" in notes(moved, plan, compiled, tmp_path)[0]


def test_other_adapters_are_refused(plan: Plan, compiled: Path, tmp_path: Path) -> None:
    lora = PlanLora(rank=4, alpha=8.0, dropout=0.0, target_modules=("q_proj",))
    adapted = dataclasses.replace(plan, lora=lora)
    assert notes(adapted, adapted, compiled, tmp_path) == ()
    others = (plan, dataclasses.replace(plan, lora=dataclasses.replace(lora, rank=8)))
    for now, saved in (*((adapted, other) for other in others), (plan, adapted)):
        with pytest.raises(Refusal) as refused:
            notes(now, saved, compiled, tmp_path)
        assert refused.value.diagnostics[0].code == "SW6254"


def test_other_tokenizers_are_refused(plan: Plan, compiled: Path, tmp_path: Path) -> None:
    """The byte tokenizer and one with files; files that only one side has."""
    out, step = tmp_path / "out", tmp_path / "step-00000004"
    shutil.copytree(compiled, out)
    for folder in (out, step):
        (folder / "tokenizer").mkdir(parents=True)
        (folder / "tokenizer" / "tokenizer.json").write_text("{}")
    files, byte = (changed(plan, "data", tokenizer=name) for name in ("tokenizer", "byte"))
    assert notes(files, files, out, tmp_path) == () == notes(byte, byte, out, tmp_path)
    for now, saved in ((files, byte), (byte, files)):
        with pytest.raises(Refusal, match="a different tokenizer"):
            notes(now, saved, out, tmp_path)
    for folder in (out, step):
        (folder / "tokenizer" / "added_tokens.json").write_text("{}")
        with pytest.raises(Refusal, match=r"added_tokens\.json differs") as refused:
            notes(files, files, out, tmp_path)
        assert refused.value.diagnostics[0].code == "SW6204"
        (folder / "tokenizer" / "added_tokens.json").unlink()


def test_states_of_another_optimizer_are_refused(
    plan: Plan, compiled: Path, tmp_path: Path
) -> None:
    muon = changed(plan, "optimizer", name="muon", momentum=0.95, ns_steps=5, adamw_lr=3e-4)
    with pytest.raises(Refusal) as refused:
        notes(muon, plan, compiled, tmp_path)
    [diagnostic] = refused.value.diagnostics
    assert diagnostic.code == "SW6260"
    assert "states of adamw" in diagnostic.message and "trains with muon" in diagnostic.message
    assert "name: adamw" in diagnostic.help


def test_a_plan_of_adamw_has_no_key_of_muon(plan: Plan) -> None:
    text = plan_to_json(plan)
    assert not any(f'"{key}"' in text for key in ("momentum", "ns_steps", "adamw_lr"))
    muon = dataclasses.replace(
        changed(plan, "optimizer", name="muon", momentum=0.95, ns_steps=5, adamw_lr=3e-4),
        muon={"model.layers.*.mlp.up_proj.weight": (), "a.*.qkv.weight": (4, 2, 2)},
    )
    assert plan_from_json(plan_to_json(muon)) == muon

    def rows_of(name: str) -> tuple[int, ...]:
        joined = muon.muon_matrices(name)
        assert joined is not None
        return joined.rows

    assert rows_of("model.layers.3.mlp.up_proj.weight") == ()
    assert rows_of("a.0.qkv.weight") == (4, 2, 2)
    assert muon.muon_matrices("model.norm.weight") is None

"""A compiled folder's recipe, planned again for fewer nodes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwright.cli import main as cli
from shardwright.plan.plan import Plan, load_plan
from shardwright.supervise.fewer_nodes import FewerNodes, unplannable_text
from tests.parity.harness import Case, recipe, write_inputs

THREE = {
    "cluster.nodes": 3,
    "cluster.gpus_per_node": 2,
    "training.global_batch_size": 12,
    "checkpoint.every_steps": 2,
    "data": {"kind": "tokens", "path": "tokens.npy"},
    "parallelism": {"tensor": 2, "pipeline": 1, "data": 3, "micro_batch_size": 2},
    "launch": {"recovery": {"min_nodes": 1}},
}


@pytest.fixture
def compile_folder(write_recipe: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    def compile_it(**changes: Any) -> Path:
        np.save(tmp_path / "tokens.npy", np.zeros((64, 32), dtype=np.int32))
        path = write_recipe({**THREE, **changes})
        out = tmp_path / "out"
        shutil.rmtree(out, ignore_errors=True)
        assert cli.main(["compile", str(path), "-o", str(out)]) == 0
        return out

    return compile_it


def planned(out: Path, nodes: int) -> tuple[Path, Plan]:
    fewer = FewerNodes(load_plan(out), out)
    assert fewer.can_plan(nodes), unplannable_text(nodes, fewer.refusals[nodes])
    folder = fewer.compile(nodes)
    return folder, load_plan(folder)


def test_the_same_training_on_fewer_nodes(compile_folder: Callable[..., Path]) -> None:
    """Data ranks go, pinned degrees stay; the recipe's files are found from elsewhere."""
    out = compile_folder()
    whole = load_plan(out)
    folder, plan = planned(out, 2)
    s = plan.strategy
    assert (plan.nodes, s.tensor, s.pipeline, s.data) == (2, 2, 1, 2)
    for field in ("training", "optimizer", "scheduler", "data", "checkpoint"):
        assert getattr(plan, field) == getattr(whole, field), field
    assert plan.model.config_hash == whole.model.config_hash
    assert plan.launch.launcher == "pdsh" and plan.launch.recovery is None
    # It shares the run and its checkpoints.
    assert (folder / "run").resolve() == (out / "run").resolve()
    assert (folder / "checkpoints").resolve() == (out / "checkpoints").resolve()
    # A second supervisor takes the plan that is there.
    before = (folder / "plan.json").stat().st_mtime_ns
    (folder / "run").unlink()
    again, _ = planned(out, 2)
    assert (again / "plan.json").stat().st_mtime_ns == before and os.path.islink(again / "run")


def test_degrees_are_freed_where_they_do_not_fit(compile_folder: Callable[..., Path]) -> None:
    """Six pipeline ranks cannot be on two nodes of two."""
    pins = {"tensor": 1, "pipeline": 6, "data": 1, "micro_batch_size": 2}
    out = compile_folder(**{"parallelism": pins, "model.config.num_hidden_layers": 6})
    _, plan = planned(out, 2)
    assert plan.strategy.world_size == 4 and plan.training.global_batch_size == 12


def test_a_batch_that_does_not_divide_is_told(compile_folder: Callable[..., Path]) -> None:
    """Three sequences on two ranks; odd heads and lengths, and ZeRO-3 knows no pipeline."""
    changes = {
        "training.global_batch_size": 3,
        "cluster.gpus_per_node": 1,
        "model.config.num_hidden_layers": 1,
        "model.config.hidden_size": 48,
        "model.config.num_attention_heads": 3,
        "model.config.num_key_value_heads": 3,
        "training.sequence_length": 33,
        "data": {"kind": "synthetic"},
        "parallelism": {"data": 3, "micro_batch_size": 1, "zero_stage": 3},
    }
    out = compile_folder(**changes)
    fewer = FewerNodes(load_plan(out), out)
    assert not fewer.can_plan(2)
    text = unplannable_text(2, fewer.refusals[2])
    assert text.startswith("the run cannot be planned again for 2 nodes: SW"), text
    assert fewer.can_plan(1)


LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {"data": 4},
    "zero2": {"data": 4, "zero_stage": 2},
    "zero3": {"data": 4, "zero_stage": 3},
    "pipeline": {"pipeline": 4},
    "tensor-data": {"tensor": 2, "data": 4},
    "tensor-context": {"tensor": 2, "context": 2, "data": 2},
    "pipeline-data": {"pipeline": 2, "data": 2},
    "pipeline-tensor": {"pipeline": 4, "tensor": 2},
    "context": {"context": 2, "data": 2},
    "context-zero3": {"context": 2, "data": 2, "zero_stage": 3},
    "expert": {"expert": 2, "data": 4},
    "expert-tensor": {"expert": 2, "data": 4, "tensor": 2},
    "expert-zero3": {"expert": 4, "data": 4, "zero_stage": 3},
    "expert-context": {"expert": 2, "context": 2, "data": 2},
}


MEGATRON = ("data", "pipeline-tensor", "tensor-context", "expert")


@pytest.mark.parametrize(
    ("target", "name"),
    [
        *(("deepspeed", name) for name in LAYOUTS),
        ("megatron", MEGATRON[0]),
        *(pytest.param("megatron", name, marks=pytest.mark.prove) for name in MEGATRON[1:]),
    ],
)
def test_every_kind_of_layout_is_planned_again(target: str, name: str, tmp_path: Path) -> None:
    """Four nodes, then three and two: the same global batch, whatever was pinned."""
    keys = LAYOUTS[name]
    case = Case(
        model="mixtral" if "expert" in keys else "llama",
        nodes=4,
        micro=1,
        accumulation=12 // keys.get("data", 1),
        target=target,
        **keys,
    )
    write_inputs(case, tmp_path)
    document = recipe(case, tmp_path)
    document["launch"]["recovery"] = {"min_nodes": 1}
    document["checkpoint"] = {"every_steps": 2}
    (tmp_path / "recipe.yaml").write_text(json.dumps(document))
    out = tmp_path / "out"
    assert cli.main(["compile", str(tmp_path / "recipe.yaml"), "-o", str(out)]) == 0
    fewer = FewerNodes(load_plan(out), out)
    assert {nodes: fewer.can_plan(nodes) for nodes in (3, 2, 1)} == dict.fromkeys((3, 2, 1), True)
    estimates = {nodes: fewer.estimates[nodes] for nodes in (3, 2, 1)}
    for nodes, estimate in estimates.items():
        s = estimate.strategy
        assert s.world_size == nodes * case.world // 4
        assert s.micro_batch_size * s.gradient_accumulation_steps * s.data == case.batch

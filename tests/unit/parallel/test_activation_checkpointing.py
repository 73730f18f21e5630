"""Which layers are recomputed, and what that leaves in memory: counted in real models."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType

from shardwright.compile.recipe_compiler import compile_recipe
from shardwright.models.graph_builder import build_model_graph
from shardwright.models.model_graph import saved_activations_entry
from shardwright.parallel.layer_compile_and_recompute import (
    apply_activation_checkpointing,
    checkpoint_layers,
    checkpointed_layers,
)
from shardwright.plan.plan import Plan, plan_from_json, plan_to_json
from shardwright.recipe.recipe_loader import load_recipe
from tests.parity.harness import Case, write_inputs
from tests.parity.models import LLAMA
from tests.parity.reference import initial_model
from tests.unit.models.factory import model_section
from tests.unit.models.test_trace import FAMILIES, LENGTH, plain_model


def plan_of(folder: Path, **layout: Any) -> Plan:
    write_inputs(Case(**layout), folder)
    return compile_recipe(load_recipe(folder / "recipe.yaml")).plan


def decoders(plan: Plan) -> list[list[str]]:
    """Of each stage."""
    return [
        [name for name in stage.layers if name not in ("embedding", "head")]
        for stage in plan.stages
    ]


@pytest.mark.parametrize(
    ("layout", "layers"),
    [
        ({"pipeline": 2, "checkpointing": {"full": 2}}, 2),
        (
            {
                "pipeline": 2,
                "schedule": "dualpipev",
                "accumulation": 4,
                "checkpointing": {"full": 1},
            },
            1,
        ),
        ({"data": 2, "zero_stage": 3, "checkpointing": {"full": 3}}, 3),
        ({"checkpointing": "full"}, 8),
        ({"checkpointing": "selective"}, 8),
        ({"checkpointing": "none"}, 0),
    ],
)
def test_the_first_layers_of_each_stage(
    layout: dict[str, Any], layers: int, tmp_path: Path
) -> None:
    plan = plan_of(tmp_path, model="llama-deep", **layout)
    assert plan == plan_from_json(plan_to_json(plan))
    stages = decoders(plan)
    assert [name for names in stages for name in names] == [
        f"model.layers.{number}" for number in range(8)
    ]
    assert list(checkpointed_layers(plan)) == [name for names in stages for name in names[:layers]]
    assert any(len(names) > layers for names in stages) or layers in (0, 8)


def test_a_stage_with_fewer_layers_recomputes_all_of_them(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, model="llama-deep", pipeline=3, checkpointing={"full": 3})
    stages = decoders(plan)
    assert min(map(len, stages)) < 3 <= max(map(len, stages))
    assert list(checkpointed_layers(plan)) == [name for names in stages for name in names[:3]]


@pytest.mark.parametrize("layers", [1, 3])
def test_they_and_no_others_run_again(layers: int, tmp_path: Path) -> None:
    plan = plan_of(tmp_path, model="llama", checkpointing={"full": layers})
    model, ran = initial_model(LLAMA, 0), Counter[int]()
    apply_activation_checkpointing(model, plan)
    for number in range(4):
        mlp = model.get_submodule(f"model.layers.{number}.mlp")
        mlp.register_forward_pre_hook(lambda *_, number=number: ran.update([number]))
    ids = torch.arange(32)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    assert ran == {number: 1 + (number < layers) for number in range(4)}
    plain = initial_model(LLAMA, 0)
    plain(input_ids=ids, labels=ids).loss.backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)


def peaks(*recomputed: int) -> tuple[int, int]:
    """Bytes that a forward pass of six layers has left, and the most at once until its backward
    pass is done."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = plain_model({**FAMILIES["llama"], "num_hidden_layers": 6}, "sdpa", torch.float32)
    checkpoint_layers([model.model.layers[i] for i in recomputed], "full", "")
    tracker, ids = MemTracker(), torch.zeros(1, LENGTH, dtype=torch.long)
    tracker.track_external(model, ids)
    with tracker:
        logits = model(input_ids=ids, use_cache=False).logits
        kept = tracker.get_tracker_snapshot("current")[torch.device("cpu")][_MemRefType.ACT]
        logits.float().sum().backward()
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    return kept, peak["Total"]


@pytest.mark.prove
def test_recomputing_the_first_layers_takes_less_than_recomputing_the_last() -> None:
    graph = build_model_graph(model_section(FAMILIES["llama"], attention="sdpa"))
    whole, inputs = (
        entry.unsharded_bytes(LENGTH) + entry.sharded_bytes(LENGTH)
        for mode in ("none", "full")
        if (entry := saved_activations_entry(graph.layers[1].kept, mode, 4, LENGTH)) is not None
    )
    none, first, last = peaks(), peaks(0, 1, 2), peaks(3, 4, 5)
    assert none[0] - first[0] == pytest.approx(3 * (whole - inputs), rel=0.02)
    assert first[0] == pytest.approx(last[0], rel=0.01)
    assert last[1] - first[1] > 0.9 * whole
    assert first[1] < none[1] - 2 * whole
    # All but the last layer take what all take: the last one is made again beside the others'
    # inputs, or kept there.
    assert peaks(*range(5))[1] == pytest.approx(peaks(*range(6))[1], rel=0.02)

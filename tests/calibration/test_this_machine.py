"""What `calibrate` makes of predictions on the machine where it runs. Wants an idle one with two
cores."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from shardwright.calibrate.calibration import calibrate, cores
from shardwright.calibrate.layout_trials import launch, recipe_for, step_seconds_figure
from shardwright.cli.estimate_command import shared_cores_lines
from shardwright.compile.compiled_folder import write_folder
from shardwright.compile.recipe_compiler import compile_recipe, read_problem
from shardwright.layout.layout import Layout
from shardwright.layout.planning_problem import Problem
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.search.layout_resolution import estimate_checked_layout

MODEL = {
    "model_type": "llama",
    "vocab_size": 2048,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 256,
}
LENGTH, BATCH, STEPS, SECONDS, LIMIT = 256, 8, 10, 30.0, 900.0
WITHIN = 0.15
PLAIN = Layout(
    tensor=1,
    pipeline=1,
    data=1,
    zero_stage=0,
    micro_batch_size=4,
    gradient_accumulation_steps=2,
    activation_checkpointing="none",
    schedule="1f1b",
    offload="none",
)


def batched(**changes: Any) -> Layout:
    s = replace(PLAIN, **changes)
    return replace(s, gradient_accumulation_steps=BATCH // s.micro_batch_size // s.data)


ONE_RANK = (batched(), batched(micro_batch_size=1), batched(activation_checkpointing="full"))
TWO_RANKS = (
    batched(data=2, zero_stage=0, micro_batch_size=2),
    batched(data=2, zero_stage=1),
    batched(data=2, zero_stage=2, micro_batch_size=2),
    batched(tensor=2),
    batched(tensor=2, activation_checkpointing="full"),
    batched(pipeline=2, zero_stage=1, micro_batch_size=1),
    batched(pipeline=2, zero_stage=1, micro_batch_size=2),
)
FOUR_RANKS = (
    batched(pipeline=2, data=2, zero_stage=1, micro_batch_size=1),
    batched(pipeline=4, zero_stage=1, micro_batch_size=1, activation_checkpointing="full"),
    batched(data=4, zero_stage=1, micro_batch_size=2),
    batched(data=4, zero_stage=1, micro_batch_size=2, activation_checkpointing="full"),
    batched(tensor=2, data=2, zero_stage=1, activation_checkpointing="full"),
    batched(tensor=4),
    batched(tensor=4, activation_checkpointing="full"),
    batched(tensor=4, micro_batch_size=2, activation_checkpointing="full"),
    batched(data=4, zero_stage=2, micro_batch_size=1),
    batched(tensor=4, micro_batch_size=1),
    batched(tensor=4, micro_batch_size=1, activation_checkpointing="full"),
    batched(tensor=2, data=2, zero_stage=3, micro_batch_size=1, activation_checkpointing="full"),
)
APART = 1.1
"""Two layouts whose steps are closer than this have no order: a layout that runs twice differs by
as much."""


def problem(folder: Path, ranks: int) -> Problem:
    """Calibrated here and now."""
    document: dict[str, Any] = {
        "version": 1,
        "name": "this-machine",
        "model": {"config": MODEL, "weights": "random"},
        "cluster": {"nodes": 1, "gpus_per_node": ranks, "gpu": "cpu"},
        "training": {
            "sequence_length": LENGTH,
            "global_batch_size": BATCH,
            "steps": STEPS,
            "precision": "fp32",
            "optimizer": {"lr": 1e-4},
        },
        "data": {"kind": "synthetic"},
    }
    path = folder / "recipe.json"
    path.write_text(json.dumps(document))
    found = calibrate(load_recipe(path), SECONDS, print).found
    (folder / "measured.json").write_text(json.dumps(asdict(found)))
    path.write_text(
        json.dumps({**document, "cluster": {**document["cluster"], "measured": "measured.json"}})
    )
    return read_problem(load_recipe(path))


def both(
    folder: Path, given: Problem, strategies: tuple[Layout, ...]
) -> Mapping[str, tuple[float, float]]:
    """Layout -> (predicted, measured) seconds of a step."""
    found = {}
    for i, s in enumerate(strategies):
        predicted = estimate_checked_layout(given, s, ()).time.step_seconds
        write_folder(
            folder / f"{i}" / "out", compile_recipe(recipe_for(given.recipe, s, STEPS)).files
        )
        seconds, _, why = launch(folder / f"{i}" / "out", STEPS + 3, LIMIT)
        assert not why, f"{s.describe()}: {why}"
        found[s.describe()] = (predicted, step_seconds_figure(seconds[3:]).value)
        print(
            f"{s.describe()}: predicted {predicted:.3g} s, measured {found[s.describe()][1]:.3g} s"
        )
    return found


@pytest.mark.prove
@pytest.mark.skipif(cores() < 2, reason="two ranks want a core each")
def test_layouts_with_a_core_a_rank(tmp_path: Path) -> None:
    found: dict[str, tuple[float, float]] = {}
    for ranks, strategies in ((1, ONE_RANK), (2, TWO_RANKS)):
        (folder := tmp_path / f"{ranks}").mkdir()
        found |= both(folder, problem(folder, ranks), strategies)
    off = {layout: predicted / measured - 1 for layout, (predicted, measured) in found.items()}
    assert len(off) >= 8 and max(map(abs, off.values())) <= WITHIN, off


@pytest.mark.prove
@pytest.mark.skipif(cores() >= 4, reason="four ranks have cores of their own")
def test_the_order_of_layouts_whose_ranks_share_cores(tmp_path: Path) -> None:
    given = problem(tmp_path, 4)
    assert shared_cores_lines(given.recipe, given.cluster)[0].startswith(
        f"4 ranks share {cores()} core"
    )
    found = both(tmp_path, given, FOUR_RANKS)
    ordered = sorted(found, key=lambda layout: found[layout][1])
    pairs = [
        (a, b) for a, b in itertools.combinations(ordered, 2) if found[b][1] >= APART * found[a][1]
    ]
    wrong = [(a, b) for a, b in pairs if found[a][0] >= found[b][0]]
    assert len(_each_apart([found[layout][1] for layout in ordered])) >= 6, found
    assert not wrong, (wrong, found)


def _each_apart(ordered: Sequence[float]) -> list[float]:
    """As many as there can be of which each is apart from the one before it."""
    kept: list[float] = []
    for seconds in ordered:
        if not kept or seconds >= APART * kept[-1]:
            kept.append(seconds)
    return kept

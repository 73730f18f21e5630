"""Each folder here is a case: recipe.yaml compiles to exactly expected/, and what must hold of every compile holds.

Some of the ready recipes go through the same invariants, without golden files (tests/recipes plans all of them).
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from shardwright.compile import Compiled, compile_recipe
from shardwright.lower.lower import MARKER
from shardwright.plan.ranks import BYTES_PER_ELEMENT
from shardwright.plan.serialize import plan_from_json, plan_to_json
from shardwright.recipe.load import load_recipe
from shardwright.resources import recipes_dir
from tests.cases.engine_numbers import load, numbers

HERE = Path(__file__).parent
CASES = sorted(path.parent for path in HERE.glob("*/recipe.yaml"))
RECIPES = {case.name: case / "recipe.yaml" for case in CASES}
READY = ("gpt2-xl-8xa100", "llama-3.1-8b-2x8h100", "qwen2-7b-8xa100", "tiny-gpt2-cpu", "tiny-llama-cpu")
RECIPES |= {f"recipes/{name}": recipes_dir() / f"{name}.yaml" for name in READY}
ANYWHERE = "/anywhere"
"""Stands for this machine's folder in the golden files."""


@pytest.fixture(scope="module")
def compiled() -> dict[str, Compiled]:
    return {name: compile_recipe(load_recipe(path)) for name, path in RECIPES.items()}


@pytest.fixture(scope="module")
def loaded(compiled: dict[str, Compiled], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    """What DeepSpeed makes of each ds_config.json at the plan's world size."""
    return dict(zip(compiled, load(list(compiled.values()), tmp_path_factory.mktemp("folders")), strict=True))


def portable(case: Path, files: dict[str, bytes]) -> dict[str, bytes]:
    place = str(case.resolve()).encode()
    return {name: content.replace(place, ANYWHERE.encode()) for name, content in files.items()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_golden(case: Path, compiled: dict[str, Compiled], update_golden: bool) -> None:
    expected = case / "expected"
    files = portable(case, dict(compiled[case.name].files))
    del files[MARKER]
    if update_golden:
        shutil.rmtree(expected, ignore_errors=True)
        for name, content in files.items():
            (expected / name).parent.mkdir(parents=True, exist_ok=True)
            (expected / name).write_bytes(content)
    golden = {str(p.relative_to(expected)): p.read_bytes() for p in expected.rglob("*") if p.is_file()}
    assert sorted(files) == sorted(golden)
    for name, content in files.items():
        assert content.decode() == golden[name].decode(), f"{name}: `make golden` writes it anew"


@pytest.mark.parametrize("name", RECIPES)
class TestInvariants:
    def test_same_recipe_same_bytes(self, name: str, compiled: dict[str, Compiled]) -> None:
        assert compile_recipe(load_recipe(RECIPES[name])).files == compiled[name].files

    def test_resolved_recipe_is_the_same_recipe(self, name: str, compiled: dict[str, Compiled], tmp_path: Path) -> None:
        copy = tmp_path / "again.json"
        copy.write_bytes(compiled[name].files["recipe.resolved.json"])
        again = load_recipe(copy)
        assert json.loads(json.dumps(again.document)) == json.loads(copy.read_bytes())

    def test_plan_round_trips(self, name: str, compiled: dict[str, Compiled]) -> None:
        text = compiled[name].files["plan.json"].decode()
        plan = plan_from_json(text)
        assert plan_to_json(plan) == text
        assert plan == dataclasses.replace(compiled[name].plan, zero=plan.zero)

    def test_layout_covers_the_machines(self, name: str, compiled: dict[str, Compiled]) -> None:
        plan = compiled[name].plan
        s = plan.strategy
        assert s.tensor * s.pipeline * s.data == plan.nodes * plan.gpus_per_node
        assert {(r.pipeline, r.data, r.tensor) for r in plan.ranks} == {
            (p, d, t) for p in range(s.pipeline) for d in range(s.data) for t in range(s.tensor)
        }
        assert {(r.node, r.slot) for r in plan.ranks} == {
            (n, g) for n in range(plan.nodes) for g in range(plan.gpus_per_node)
        }

    def test_tensor_groups_stay_inside_a_node(self, name: str, compiled: dict[str, Compiled]) -> None:
        nodes: dict[tuple[int, int], set[int]] = {}
        for rank in compiled[name].plan.ranks:
            nodes.setdefault((rank.pipeline, rank.data), set()).add(rank.node)
        assert all(len(held) == 1 for held in nodes.values())

    def test_each_layer_on_one_stage(self, name: str, compiled: dict[str, Compiled]) -> None:
        plan = compiled[name].plan
        layers = [layer for stage in plan.stages for layer in stage.layers]
        config = json.loads(compiled[name].files["model/config.json"])
        count = config.get("num_hidden_layers") or config["n_layer"]
        assert layers == ["embedding", *(f"{plan.model.cut.stack}.{i}" for i in range(count)), "head"]

    def test_ranks_hold_the_whole_model(self, name: str, compiled: dict[str, Compiled]) -> None:
        """Over pipeline and tensor ranks (and ZeRO-3's data ranks) nothing is missing."""
        plan = compiled[name].plan
        data = range(plan.strategy.data) if plan.strategy.zero_stage == 3 else (0,)
        held = sum(r.parameter_bytes for r in plan.ranks if r.data in data)
        assert held >= plan.model.total_parameters * BYTES_PER_ELEMENT[plan.training.precision]

    def test_memory_fits(self, name: str, compiled: dict[str, Compiled]) -> None:
        memory = compiled[name].plan.predicted.memory
        assert memory.fits and 0 < memory.peak_bytes <= memory.capacity_bytes
        assert memory.peak_bytes == max(stage.peak_bytes for stage in memory.stages)

    def test_deepspeed_reads_what_the_plan_says(
        self, name: str, compiled: dict[str, Compiled], loaded: dict[str, dict[str, object]]
    ) -> None:
        assert loaded[name] == numbers(compiled[name].plan)

    def test_scripts_are_valid_bash(self, name: str, compiled: dict[str, Compiled]) -> None:
        scripts = [content for path, content in compiled[name].files.items() if path.endswith(".sh")]
        for script in scripts:
            assert subprocess.run(["bash", "-n"], input=script, capture_output=True).stderr == b""

    def test_no_artifact_shards_twice_or_names_a_clock(self, name: str, compiled: dict[str, Compiled]) -> None:
        config = json.loads(compiled[name].files["ds_config.json"])
        assert "tensor_parallel" not in config and "scheduler" not in config
        assert "gradient_clipping" in config

"""Each folder here is a case: recipe.yaml compiles to exactly expected/, to the figures of
figures.json within a tolerance, and what must hold of every compile holds.

Some of the ready recipes go through the same invariants, without golden files (tests/recipes plans
all of them).
"""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from shardwright.compile.compiled_folder import MARKER
from shardwright.compile.recipe_compiler import CompileResult, compile_recipe
from shardwright.layout.formats import element_bytes
from shardwright.plan.folder_paths import PLAN_FILE
from shardwright.plan.plan import plan_from_json, plan_to_json
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.utils.installation import recipes_folder
from tests.cases.engine_numbers import load, numbers
from tests.cases.golden_figures import (
    RELATIVE_TOLERANCE,
    read_figures,
    split_figures,
    write_figures,
)
from tests.unit.launch.launchers.fake_programs import shell_warnings

HERE = Path(__file__).parent
CASES = sorted(path.parent for path in HERE.glob("*/recipe.yaml"))
RECIPES = {case.name: case / "recipe.yaml" for case in CASES}
READY = (
    "gpt2-xl-8xa100",
    "llama-3.1-8b-2x8h100",
    "qwen2-7b-8xa100",
    "tiny-gpt2-cpu",
    "tiny-llama-cpu",
)
RECIPES |= {f"recipes/{name}": recipes_folder() / f"{name}.yaml" for name in READY}
ANYWHERE = "/anywhere"
"""Stands for this machine's folder in the golden files."""


@pytest.fixture(scope="module")
def compiled() -> dict[str, CompileResult]:
    return {name: compile_recipe(load_recipe(path)) for name, path in RECIPES.items()}


@pytest.fixture(scope="module")
def loaded(
    compiled: dict[str, CompileResult], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, object]]:
    """Load each ds_config.json with DeepSpeed at the plan's world size."""
    return dict(
        zip(
            compiled, load(list(compiled.values()), tmp_path_factory.mktemp("folders")), strict=True
        )
    )


def of_each_layer(compiled: CompileResult) -> dict[str, list[tuple[str, int]]]:
    """Layer of the plan -> its parameters and their elements, by a model that config.json
    builds."""
    config = json.loads(compiled.files["model/config.json"])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(config.pop("model_type"), **config)
        )
    cut = compiled.plan.model
    found: dict[str, list[tuple[str, int]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        inside = name.removeprefix(f"{cut.cut.stack}.")
        sides = {"embedding": cut.embedding_modules, "head": cut.head_modules}
        layers = [
            side
            for side, modules in sides.items()
            if any(f"{name}.".startswith(f"{m}.") for m in modules)
        ]
        for layer in layers if inside == name else [f"{cut.cut.stack}.{inside.split('.')[0]}"]:
            found.setdefault(layer, []).append((name, parameter.numel()))
    assert sum(p.numel() for p in model.parameters()) == cut.total_parameters
    return found


def portable(case: Path, files: dict[str, bytes]) -> dict[str, bytes]:
    place = str(case.resolve()).encode()
    return {name: content.replace(place, ANYWHERE.encode()) for name, content in files.items()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_golden(case: Path, compiled: dict[str, CompileResult], update_golden: bool) -> None:
    expected = case / "expected"
    files = portable(case, dict(compiled[case.name].files))
    del files[MARKER]
    plan, figures = split_figures(files[PLAN_FILE].decode())
    files[PLAN_FILE] = plan.encode()
    if update_golden:
        known = read_figures()
        write_figures({c.name: known.get(c.name, {}) for c in CASES} | {case.name: figures})
        shutil.rmtree(expected, ignore_errors=True)
        for name, content in files.items():
            (expected / name).parent.mkdir(parents=True, exist_ok=True)
            (expected / name).write_bytes(content)
    golden = {
        str(p.relative_to(expected)): p.read_bytes() for p in expected.rglob("*") if p.is_file()
    }
    assert sorted(files) == sorted(golden)
    for name, content in files.items():
        assert content.decode() == golden[name].decode(), f"{name}: `make generated` writes it anew"
    assert figures == pytest.approx(read_figures()[case.name], rel=RELATIVE_TOLERANCE, abs=0)


def test_figures_are_of_the_cases() -> None:
    assert set(read_figures()) == {case.name for case in CASES}


@pytest.mark.parametrize(("factor", "is_equal"), [(1 + 1e-7, True), (1 + 1e-5, False)])
def test_figures_have_a_tolerance(factor: float, is_equal: bool) -> None:
    figures = read_figures()[CASES[0].name]
    other = figures | {"time.step_seconds": figures["time.step_seconds"] * factor}
    assert (other == pytest.approx(figures, rel=RELATIVE_TOLERANCE, abs=0)) is is_equal


@pytest.mark.parametrize("name", RECIPES)
class TestInvariants:
    def test_same_recipe_same_bytes(self, name: str, compiled: dict[str, CompileResult]) -> None:
        assert compile_recipe(load_recipe(RECIPES[name])).files == compiled[name].files

    def test_resolved_recipe_is_the_same_recipe(
        self, name: str, compiled: dict[str, CompileResult], tmp_path: Path
    ) -> None:
        copy = tmp_path / "again.json"
        copy.write_bytes(compiled[name].files["recipe.resolved.json"])
        again = load_recipe(copy)
        assert json.loads(json.dumps(again.document)) == json.loads(copy.read_bytes())

    def test_plan_round_trips(self, name: str, compiled: dict[str, CompileResult]) -> None:
        text = compiled[name].files["plan.json"].decode()
        plan = plan_from_json(text)
        assert plan_to_json(plan) == text
        assert plan == compiled[name].plan

    def test_layout_covers_the_machines(
        self, name: str, compiled: dict[str, CompileResult]
    ) -> None:
        plan = compiled[name].plan
        s = plan.strategy
        assert s.tensor * s.pipeline * s.context * s.data == plan.nodes * plan.gpus_per_node
        assert {(r.pipeline, r.data, r.context, r.tensor) for r in plan.ranks} == set(
            itertools.product(range(s.pipeline), range(s.data), range(s.context), range(s.tensor))
        )
        assert {(r.node, r.slot) for r in plan.ranks} == {
            (n, g) for n in range(plan.nodes) for g in range(plan.gpus_per_node)
        }

    def test_tensor_groups_stay_inside_a_node(
        self, name: str, compiled: dict[str, CompileResult]
    ) -> None:
        nodes: dict[tuple[int, int, int], set[int]] = {}
        for rank in compiled[name].plan.ranks:
            nodes.setdefault((rank.pipeline, rank.data, rank.context), set()).add(rank.node)
        assert all(len(held) == 1 for held in nodes.values())

    def test_each_layer_on_one_stage(self, name: str, compiled: dict[str, CompileResult]) -> None:
        plan = compiled[name].plan
        layers = [layer for stage in plan.stages for layer in stage.layers]
        config = json.loads(compiled[name].files["model/config.json"])
        count = config.get("num_hidden_layers") or config["n_layer"]
        assert layers == [
            "embedding",
            *(f"{plan.model.cut.stack}.{i}" for i in range(count)),
            "head",
        ]

    def test_ranks_hold_the_whole_model(
        self, name: str, compiled: dict[str, CompileResult]
    ) -> None:
        """Over a pipeline rank's tensor ranks (ZeRO-3's data and context ranks too): its layers'
        parameters of the model, a whole one on every tensor rank, and nothing else."""
        plan = compiled[name].plan
        whole = {
            p.name
            for m in plan.tensor_parallel.modules
            for p in m.parameters
            if p.dimension is None
        }
        shards = plan.strategy.zero_world_size if plan.strategy.zero_stage == 3 else 1
        elements = of_each_layer(compiled[name])
        for pipeline in range(plan.strategy.pipeline):
            mine = {
                k: n
                for s in plan.stages
                if s.pipeline_rank == pipeline
                for at in s.layers
                for k, n in elements[at]
            }
            wanted = sum(
                n * (plan.strategy.tensor if parameter in whole else 1)
                for parameter, n in mine.items()
            )
            held = sum(
                r.parameter_bytes
                for r in plan.ranks
                if r.pipeline == pipeline and (shards > 1 or r.data == r.context == 0)
            )
            size = element_bytes(plan.training.precision)
            padding = len(mine) * shards * plan.strategy.tensor * size if shards > 1 else 0
            assert wanted * size <= held <= wanted * size + padding, pipeline

    def test_the_fullest_rank_is_priced(
        self, name: str, compiled: dict[str, CompileResult]
    ) -> None:
        """The memory is predicted with the bytes that a rank will hold, which runs check to the
        byte."""
        plan = compiled[name].plan
        predicted = [stage.parameters_bytes for stage in plan.predicted.memory.stages]
        fullest = [
            max(r.parameter_bytes for r in plan.ranks if r.pipeline == rank)
            for rank in range(plan.strategy.pipeline)
        ]
        # A run checks its shards; hpZ's second copy, on the ranks of a node, is DeepSpeed's own.
        s = plan.strategy
        copies = s.zero_world_size // s.hpz_partition_size if s.hpz_partition_size > 1 else 0
        assert predicted == pytest.approx([held * (1 + copies) for held in fullest], rel=1e-9)
        states = (
            4 + 2 * 4 if plan.strategy.zero_stage or plan.training.precision != "fp32" else 2 * 4
        )
        share = plan.strategy.zero_world_size if plan.strategy.zero_stage in (1, 2) else 1
        per_byte = states / share / element_bytes(plan.training.precision)
        optimizer = [stage.optimizer_bytes for stage in plan.predicted.memory.stages]
        assert optimizer == pytest.approx([held * per_byte for held in fullest], rel=1e-6)

    def test_deepspeed_reads_what_the_plan_says(
        self, name: str, compiled: dict[str, CompileResult], loaded: dict[str, dict[str, object]]
    ) -> None:
        assert loaded[name] == numbers(compiled[name].plan)

    def test_scripts_are_valid_bash(self, name: str, compiled: dict[str, CompileResult]) -> None:
        scripts = [
            content for path, content in compiled[name].files.items() if path.endswith(".sh")
        ]
        for script in scripts:
            assert subprocess.run(["bash", "-n"], input=script, capture_output=True).stderr == b""
            assert shell_warnings(script) == ""

    def test_no_artifact_shards_twice_or_names_a_clock(
        self, name: str, compiled: dict[str, CompileResult]
    ) -> None:
        config = json.loads(compiled[name].files["ds_config.json"])
        assert "tensor_parallel" not in config and "scheduler" not in config
        assert "gradient_clipping" in config

"""The order of the stages, what is refused together, and that a refusal writes nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwright.compile.recipe_compiler import (
    compile_recipe,
    estimate_recipe,
    read_inputs,
    read_problem,
    resolve_recipe,
)
from shardwright.cost.goodput import goodput
from shardwright.diagnostics import Refusal
from shardwright.plan.plan import plan_from_json
from shardwright.recipe.recipe_loader import load_recipe


def codes(path: Path) -> list[str]:
    with pytest.raises(Refusal) as caught:
        compile_recipe(load_recipe(path))
    assert caught.value.source is not None
    assert all(d.help for d in caught.value.diagnostics)
    return sorted(d.code for d in caught.value.diagnostics)


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("deepspeed", reason="a plan records the version of its packages")
    return subprocess.run(
        [sys.executable, "-m", "shardwright", "compile", *map(str, arguments)],
        capture_output=True,
        text=True,
    )


def test_the_beginnings_of_the_column_are_what_compile_goes_through(
    write_recipe: Callable[..., Path],
) -> None:
    recipe = load_recipe(write_recipe())
    problem, estimate = estimate_recipe(recipe)
    inputs = read_inputs(recipe)
    read = read_problem(recipe)
    assert (
        (problem.graph, problem.cluster)
        == (inputs.graph, inputs.cluster)
        == (read.graph, read.cluster)
    )
    assert resolve_recipe(recipe) == (problem, None) and problem.recipe is recipe
    compiled = compile_recipe(recipe)
    plan = compiled.plan
    assert (plan.strategy, plan.predicted.time) == (estimate.strategy, estimate.time)
    assert (plan.nodes, plan.model.config_hash) == (
        problem.cluster.nodes,
        problem.graph.config_hash,
    )
    assert (
        compiled.error == estimate.error
        and plan_from_json(compiled.files["plan.json"].decode()) == plan
    )


def test_auto_saves_are_settled_once(write_recipe: Callable[..., Path]) -> None:
    """In the plan as a number, the same each time; of a recipe that says its own nothing is
    changed."""
    changes = {
        "training.steps": 10**6,
        "checkpoint.every_steps": "auto",
        "cluster.node_mtbf_hours": 2,
    }
    recipe = load_recipe(write_recipe(changes))
    compiled, again = compile_recipe(recipe), compile_recipe(recipe)
    expected = goodput(*estimate_recipe(recipe))
    assert expected is not None and 1 < expected.auto_interval_steps < 10**6
    assert (
        compiled.plan.checkpoint.every_steps
        == expected.interval_steps
        == expected.auto_interval_steps
    )
    assert compiled.files == again.files
    assert json.loads(compiled.files["recipe.resolved.json"])["checkpoint"]["every_steps"] == "auto"
    often = load_recipe(write_recipe({**changes, "cluster.node_mtbf_hours": 0.5}))
    assert (compile_recipe(often).plan.checkpoint.every_steps or 0) < expected.auto_interval_steps
    for every in (None, 7):
        plain = compile_recipe(load_recipe(write_recipe({"checkpoint.every_steps": every})))
        assert plain.plan.checkpoint.every_steps == every
        cluster = json.loads(plain.files["recipe.resolved.json"])["cluster"]
        assert cluster["node_mtbf_hours"] is cluster["checkpoint_gbytes_per_second"] is None


def test_independent_errors_come_together(write_recipe: Callable[..., Path]) -> None:
    changes = {
        "data": None,
        "assume": {"mfu": 0.4},
        "cluster.gpu": "a1000",
        "model.config.hidden_sise": 64,
        "launch": {"launcher": "slurm", "hostfile": "hosts"},
    }
    assert codes(write_recipe(changes)) == [
        "SW1301",
        "SW1910",
        "SW1914",
        "SW2005",
        "SW3001",
        "SW5207",
    ]


def test_layout_errors_come_with_the_others(write_recipe: Callable[..., Path]) -> None:
    """Three tensor ranks for four heads, and a key for estimates alone; each is told once."""
    changes = {
        "cluster.gpus_per_node": 3,
        "parallelism": {
            "tensor": 3,
            "pipeline": 1,
            "data": 1,
            "micro_batch_size": 2,
            "virtual_stages": 2,
        },
        "assume": {"mfu": 0.4},
    }
    found = codes(write_recipe(changes))
    assert "SW3103" in found and "SW1914" in found
    assert found.count("SW1909") == 1 and "SW3115" not in found


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        (
            {
                "parallelism.tensor": 4,
                "parallelism.pipeline": 1,
                "model.config.hidden_size": 96,
                "model.config.num_attention_heads": 12,
                "model.config.num_key_value_heads": 3,
            },
            "SW3104",
        ),
        ({"parallelism.zero_stage": 3}, "SW3108"),
        ({"model.config.num_hidden_layers": 1, "parallelism": {"pipeline": 4}}, "SW3106"),
        ({"model.config.hidden_size": 65536, "model.config.intermediate_size": 262144}, "SW3202"),
    ],
)
def test_layouts_that_cannot_be(
    write_recipe: Callable[..., Path], changes: dict[str, Any], code: str
) -> None:
    assert code in codes(write_recipe(changes))


def test_command_writes_and_says_what_is_next(
    write_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    recipe, out = write_recipe(), tmp_path / "o u't"
    first = command(recipe, "-o", out, "--set", "training.steps=7")
    assert (first.returncode, first.stderr) == (0, "")
    assert "tensor=2 pipeline=2 data=1" in first.stdout and "7 steps" in first.stdout
    assert first.stdout.splitlines()[-1].split(maxsplit=1) == [
        "next",
        f"shardwright run '{tmp_path}/o u'\"'\"'t'",
    ]
    assert json.loads((out / "recipe.resolved.json").read_text())["training"]["steps"] == 7

    again = command(recipe, "-o", out, "--json")
    assert again.returncode == 0
    told = json.loads(again.stdout)
    assert told["directory"] == str(out) and told["strategy"]["tensor"] == 2
    assert sorted(told["files"]) == sorted(
        str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()
    )
    assert json.loads((out / "plan.json").read_text())["training"]["steps"] == 10


def test_refusals_write_nothing_and_show_no_traceback(
    write_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("mine")
    (tmp_path / "file").write_text("mine")
    good, bad = (
        write_recipe(),
        write_recipe({"parallelism.tensor": 3, "cluster.gpus_per_node": 6}, "bad.json"),
    )
    before = sorted(tmp_path.rglob("*"))
    for recipe, out, code in (
        (good, foreign, "SW5102"),
        (good, tmp_path / "file", "SW5101"),
        (bad, tmp_path / "new", "SW3103"),
        (bad, foreign, "SW5102"),
        (tmp_path / "absent.yaml", tmp_path / "new", "SW1001"),
    ):
        done = command(recipe, "-o", out)
        assert done.returncode == 1, done.stdout
        assert (
            f"error[{code}]" in done.stderr and "Traceback" not in done.stderr and done.stdout == ""
        )
    assert sorted(tmp_path.rglob("*")) == before


def test_no_path_of_the_output_in_the_output(
    write_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    recipe = write_recipe()
    for name in ("one", "two-longer"):
        assert command(recipe, "-o", tmp_path / name).returncode == 0
    done = subprocess.run(
        ["diff", "-r", tmp_path / "one", tmp_path / "two-longer"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_paths_with_shell_text_are_never_run(
    write_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    name = "$(touch pwned) `touch pwned` 'x' \"y\""
    (tmp_path / name).mkdir()
    (tmp_path / name / "corpus.txt").write_text("text")
    recipe = write_recipe(
        {"data": {"kind": "text", "path": f"{name}/corpus.txt", "tokenizer": "byte"}}
    )
    out = tmp_path / name / "out"
    assert command(recipe, "-o", out).returncode == 0
    assert json.loads((out / "plan.json").read_text())["data"]["path"] == str(
        tmp_path / name / "corpus.txt"
    )
    assert subprocess.run(["bash", "-n", out / "launch.sh"], capture_output=True).stderr == b""
    assert not list(tmp_path.rglob("pwned"))

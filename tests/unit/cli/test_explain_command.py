"""`explain` of a recipe and of a compiled folder: its figures are the plan's, and a folder needs
nothing but itself."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwright.cli.explain_plan import last_learning_rate_is_zero
from shardwright.cli.main import main
from shardwright.models.model_graph_json import graph_from_json, graph_to_json
from shardwright.models.model_sources import catalog_ids
from shardwright.recipe.recipe_loader import load_recipe
from tests.cli.test_speed import LIGHT
from tests.unit.cli.shipped_models import shipped, write_llama

Write = Callable[..., Path]
ROOT = Path(__file__).resolve().parents[3]


def told(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    capsys.readouterr()
    assert main([*words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "source", [*catalog_ids()[::9], "deepseek-ai/DeepSeek-V3", "google/gemma-2-9b"]
)
def test_a_graph_comes_back_as_it_was(source: str) -> None:
    text = graph_to_json(shipped(source))
    assert graph_from_json(text) == shipped(source)
    vision = shipped(source).vision
    blocks = 0 if vision is None else len(vision.layers)  # of a tower, each written out
    assert len(text) < (64 + 2 * blocks) * 1024


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"layer_kinds": [], "layers": [["embedding", 0]]}']
)
def test_what_is_no_graph(text: str) -> None:
    with pytest.raises(ValueError):
        graph_from_json(text)


def test_a_plan_is_taken_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_llama(tmp_path)
    plans = told(capsys, "plan", path)["plans"]
    found = told(capsys, "explain", path)
    assert (found["strategy"], found["time"], found["memory"]) == tuple(
        plans[0][key] for key in ("strategy", "time", "memory")
    )
    assert sum(found["breakdown"]["step"].values()) == pytest.approx(
        found["time"]["step_seconds"], rel=1e-12
    )
    assert found["place"] == 1 and not found["next_best_without_pins"]
    assert [other["strategy"] for other in found["next_best"]] == [
        plan["strategy"] for plan in plans[1:4]
    ]
    for other, plan in zip(found["next_best"], plans[1:4], strict=True):
        assert other["slower"] == pytest.approx(
            plan["time"]["step_seconds"] / found["time"]["step_seconds"] - 1
        )
        assert other["because"]
    assert {reason["key"]: reason["value"] for reason in found["keys"]} == {
        key: value
        for key, value in found["strategy"].items()
        if key in {r["key"] for r in found["keys"]}
    }


def test_sensitivity_is_a_plan_of_the_better_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    links = {"inter_node_gbits_per_second": 100, "intra_node_gbytes_per_second": 300}
    plain = {"nodes": 2, "gpus_per_node": 8, "gpu": "a100-sxm4-80gb", **links}
    found = told(capsys, "explain", write_llama(tmp_path, cluster=plain))
    changes = {
        "inter_node_bandwidth": "inter_node_gbits_per_second",
        "intra_node_bandwidth": "intra_node_gbytes_per_second",
    }
    resources = {each["resource"]: each for each in found["sensitivity"]}
    assert {"memory", "peak_flops", *changes} <= set(resources)
    for resource, key in changes.items():
        better = write_llama(tmp_path, "better.yaml", cluster={**plain, key: links[key] * 1.2})
        best = told(capsys, "plan", better)["plans"][0]
        each = resources[resource]["best_layout"]
        assert each["strategy"] == best["strategy"]
        assert each["step_seconds"] == pytest.approx(best["time"]["step_seconds"], rel=1e-9)
    assert all(each["same_layout"]["change"] <= 1e-9 for each in found["sensitivity"])
    assert -1 / 6 - 1e-6 <= resources["peak_flops"]["same_layout"]["change"] < -0.05


def test_pins_are_weighed_against_what_they_keep_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pins = {
        "tensor": 8,
        "pipeline": 1,
        "zero_stage": 1,
        "micro_batch_size": 1,
        "activation_checkpointing": "full",
    }
    found = told(capsys, "explain", write_llama(tmp_path, parallelism={**pins, "schedule": "1f1b"}))
    assert found["place"] > 1 and found["next_best_without_pins"]
    assert found["next_best"][0]["slower"] < 0
    assert {r["key"] for r in found["keys"] if r["pinned"]} == {*pins, "schedule"}


def test_one_node_has_no_links_between_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_llama(tmp_path, cluster={"nodes": 1, "gpus_per_node": 8, "gpu": "h100-sxm-80gb"})
    resources = [each["resource"] for each in told(capsys, "explain", path)["sensitivity"]]
    assert "inter_node_bandwidth" not in resources and "intra_node_bandwidth" in resources


def test_the_nvlink_domain_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = {"nodes": 16, "gpus_per_node": 4, "gpu": "gb200-nvl-186gb"}
    path = write_llama(tmp_path, cluster=cluster)
    found = told(capsys, "explain", path)
    assert found["cluster"] == {**cluster, "nvlink_domain_gpus": 64}
    assert "inter_node_bandwidth" not in {each["resource"] for each in found["sensitivity"]}
    assert told(capsys, "estimate", path)["cluster"] == found["cluster"]
    assert main(["explain", path]) == 0
    assert "16 x 4 gb200-nvl-186gb, NVLink domains of 64 GPUs\n" in capsys.readouterr().out


def test_what_does_not_run_is_taken_apart_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_llama(tmp_path, parallelism={"pipeline": 2, "zero_stage": 3})
    found = told(capsys, "explain", path, code=1)
    assert found["place"] is None and [d["code"] for d in found["diagnostics"]] == ["SW3108"]
    assert sum(found["breakdown"]["step"].values()) == pytest.approx(found["time"]["step_seconds"])
    assert main(["explain", path]) == 1
    captured = capsys.readouterr()
    assert "it does not run (SW3108)" in captured.out and "error[SW3108]" in captured.err


@pytest.fixture
def compiled(write_recipe: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert main(["compile", str(write_recipe()), "-o", str(tmp_path / "built")]) == 0
    return (tmp_path / "built").rename(
        tmp_path / "elsewhere"
    )  # nothing of it knows where it was made


def test_a_folder_explains_itself(
    compiled: Path, write_recipe: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = json.loads((compiled / "plan.json").read_text())
    found = told(capsys, "explain", str(compiled))
    assert found["strategy"] == plan["strategy"] and found["predicted_by_this_version"]
    for part, more in (
        ("time", {"step_error_fraction", "error_regime"}),
        ("memory", {"peak_error_fraction"}),
    ):
        assert {key: value for key, value in found[part].items() if key not in more} == plan[
            "predicted"
        ][part]
        assert more <= set(found[part])
    assert [rank["layers"] for rank in found["breakdown"]["ranks"]] == [
        stage["layers"] for stage in plan["stages"]
    ]
    of_recipe = told(capsys, "explain", str(write_recipe()))
    differ = {key for key in found if found[key] != of_recipe[key]}
    assert differ == {"recipe"}


@pytest.mark.parametrize("words", [[], ["--why-not", "tensor=4"], ["--json"]])
def test_a_folder_needs_no_torch_no_network_and_no_cache(
    words: list[str], compiled: Path, tmp_path: Path
) -> None:
    environment = {
        **os.environ,
        "SHARDWRIGHT_CACHE": str(tmp_path / "nothing"),
        "HF_HUB_CACHE": str(tmp_path / "no"),
    }
    command = [sys.executable, "-c", LIGHT, "explain", str(compiled), *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "nothing").exists()


def test_another_versions_prediction_is_told(
    compiled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = compiled / "plan.json"
    plan = json.loads(path.read_text())
    plan["predicted"]["time"]["step_seconds"] *= 1.5
    plan["versions"]["shardwright"] = "0.0.7"
    path.write_text(json.dumps(plan))
    assert main(["explain", str(compiled)]) == 0
    out = capsys.readouterr().out
    assert "shardwright 0.0.7 predicted" in out
    assert not told(capsys, "explain", str(compiled))["predicted_by_this_version"]


def test_folders_that_are_none(
    compiled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", str(tmp_path)]) == 1
    assert "SW6001" in capsys.readouterr().err
    (compiled / "model_graph.json").write_text("{}")
    assert main(["explain", str(compiled)]) == 1
    assert "SW3322" in capsys.readouterr().err
    assert main(["explain", str(compiled), "--set", "training.steps=1"]) == 1
    assert "--set" in capsys.readouterr().err


def test_a_page_in_a_pipe_is_plain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", write_llama(tmp_path)]) == 0
    first = capsys.readouterr().out
    assert "\x1b" not in first and "Memory: GiB" in first and "What more would change" in first
    assert main(["explain", write_llama(tmp_path)]) == 0
    assert capsys.readouterr().out == first


def test_codes_still_mean_what_they_mean(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "sw3108"]) == 0
    assert "SW3108" in capsys.readouterr().out
    assert main(["explain", "SW9999"]) == 1
    assert main(["explain", "SW3108", "--why-not", "tensor=2"]) == 1


@pytest.mark.parametrize(
    ("gigabits", "memory_gib", "objective", "words"),
    [
        (
            25,
            80,
            "throughput",
            "a second copy inside each node, shared out over 8 ranks (hpZ): without it +",
        ),
        (4000, 80, "throughput", "no second copy inside each node (hpZ): the step would take"),
        (25, 14, "throughput", "leaves less than predictions fall short by"),
        (25, 80, "memory", "no second copy inside each node (hpZ): objective: memory"),
    ],
)
def test_why_there_is_a_second_copy_of_the_weights(
    gigabits: int,
    memory_gib: int,
    objective: str,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gpu = {"memory_gib": memory_gib, "hbm_gbytes_per_second": 2039, "peak_tflops": {"bf16": 312}}
    cluster = {"nodes": 4, "gpus_per_node": 8, "gpu": gpu, "intra_node_gbytes_per_second": 300}
    pins = {
        "pipeline": 1,
        "tensor": 1,
        "zero_stage": 3,
        "micro_batch_size": 1,
        "activation_checkpointing": "full",
    }
    path = write_llama(
        tmp_path,
        cluster={**cluster, "inter_node_gbits_per_second": gigabits},
        training={"sequence_length": 2048, "global_batch_size": 32, "steps": 1000},
        parallelism=pins,
        objective=objective,
    )
    found = told(capsys, "explain", path)
    copy, step = found["hpz_alternative"], found["time"]["step_seconds"]
    assert copy["ranks"] == 8 and copy["taken"] == words.startswith("a second")
    assert found["strategy"]["hpz_partition_size"] == (8 if copy["taken"] else 1)
    slower = copy["other_step_seconds"] > step
    assert slower == (copy["taken"] or gigabits == 4000)
    assert copy["has_headroom"] == (memory_gib == 80)
    main(["explain", path])
    assert words in capsys.readouterr().out


@pytest.mark.parametrize(
    ("scheduler", "said"),
    [
        ({}, True),
        ({"min_lr_ratio": 0.1}, False),
        ({"min_lr": 1e-5}, False),
        ({"name": "constant"}, False),
    ],
)
def test_a_last_step_that_trains_nothing_is_said(scheduler: dict[str, Any], said: bool) -> None:
    training = load_recipe(ROOT / "recipes/tiny-llama-cpu.yaml").training
    section = dataclasses.replace(
        training.scheduler,
        **{
            "name": "cosine",
            "min_lr": None,
            "min_lr_ratio": None,
            "decay_steps": None,
            **scheduler,
        },
    )
    assert last_learning_rate_is_zero(dataclasses.replace(training, scheduler=section)) == said


@pytest.mark.parametrize(("name", "said"), [("cosine", True), ("constant", False)])
def test_explain_prints_that_the_last_step_trains_nothing(
    name: str, said: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pins = {
        "tensor": 2,
        "pipeline": 1,
        "data": 8,
        "zero_stage": 1,
        "micro_batch_size": 1,
        "schedule": "1f1b",
    }
    training = {
        "sequence_length": 2048,
        "global_batch_size": 256,
        "steps": 1000,
        "scheduler": {"name": name},
    }
    main(["explain", write_llama(tmp_path, parallelism=pins, training=training)])
    assert ("the last step's learning rate is 0" in capsys.readouterr().out) == said

"""`estimate` and `plan`: the objects that they print, their exit codes, and bad input in the middle
of a batch."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from shardwright.cli.main import COMMANDS
from shardwright.cli.plan_command import free_memory_text
from shardwright.diagnostics import Refusal
from shardwright.layout.layout_estimate import Memory
from shardwright.search.cluster_sizing import SmallerClusterBatch
from tests.unit.models.factory import SMALL_LLAMA, graph_of

PINNED = {
    "tensor": 2,
    "pipeline": 2,
    "data": 2,
    "zero_stage": 1,
    "micro_batch_size": 1,
    "activation_checkpointing": "none",
    "schedule": "1f1b",
}


def write(folder: Path, name: str, **changes: Any) -> str:
    document = {
        "version": 1,
        "name": "test",
        "model": {"config": SMALL_LLAMA, "weights": "random"},
        "cluster": {"nodes": 1, "gpus_per_node": 8, "gpu": "h100-sxm-80gb"},
        "training": {"sequence_length": 128, "global_batch_size": 16, "steps": 10},
        "parallelism": PINNED,
        **changes,
    }
    path = folder / name
    path.write_text(json.dumps(document))
    return str(path)


def call(command: str, *argv: str) -> int:
    parser = argparse.ArgumentParser()
    add_arguments, run = COMMANDS[command].functions(command)
    add_arguments(parser)
    return run(parser.parse_args(argv))


def test_one_json_line_a_recipe_in_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = write(tmp_path, "good.yaml")
    forbidden = write(tmp_path, "forbidden.yaml", parallelism={**PINNED, "zero_stage": 3})
    broken = tmp_path / "broken.yaml"
    broken.write_text("version: [1\n")
    unknown = write(tmp_path, "gpu.yaml", cluster={"nodes": 1, "gpus_per_node": 8, "gpu": "h1000"})
    paths = [forbidden, good, str(broken), unknown, str(tmp_path / "none.yaml")]
    assert call("estimate", "--json", *paths) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["recipe"] for line in lines] == paths
    assert [line["feasible"] for line in lines] == [False, True, False, False, False]
    assert all(
        "memory" not in line and "time" not in line and line["diagnostics"] for line in lines[2:]
    )
    assert [d["code"] for d in lines[0]["diagnostics"]] == ["SW3108"]
    assert [d["code"] for d in lines[3]["diagnostics"]] == ["SW3001"]
    for line in lines[:2]:
        assert {
            key: line["strategy"][key] for key in ("tensor", "pipeline", "data")
        } == dict.fromkeys(("tensor", "pipeline", "data"), 2)
        assert line["strategy"]["gradient_accumulation_steps"] == 8
        time = line["time"]
        parts = [time[f"{p}_seconds"] for p in ("compute", "optimizer", "bubble")]
        parts += [time[f"{p}_comm_seconds"] for p in ("tensor", "pipeline", "data")]
        assert sum(parts) == pytest.approx(time["step_seconds"], rel=1e-6)
        assert [stage["stage"] for stage in line["memory"]["stages"]] == [0, 1]
        assert line["memory"]["capacity_bytes"] == 80 * 2**30
        assert line["training"] == {
            "steps": 10,
            "days": pytest.approx(10 * time["step_seconds"] / 86400),
            "gpu_hours": pytest.approx(80 * time["step_seconds"] / 3600),
            "cost": None,
        }


@pytest.mark.parametrize(
    "axis",
    [
        {"virtual_stages": 2},
        {"sequence_parallel": True, "tensor": "auto", "pipeline": "auto", "data": "auto"},
    ],
)
def test_an_axis_that_the_target_lacks_is_not_feasible(
    axis: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, "axis.yaml", parallelism={**PINNED, **axis})
    assert call("estimate", "--json", path) == 1
    line = json.loads(capsys.readouterr().out)
    assert line["feasible"] is False
    assert "SW3115" in [d["code"] for d in line["diagnostics"]]
    assert call("plan", "--json", path) == 1
    assert json.loads(capsys.readouterr().out)["pareto"] == []


def test_auto_of_an_axis_that_is_not_there_yet_is_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    later: dict[str, Any] = dict.fromkeys(("expert", "context"), "auto")
    later |= {"virtual_stages": "auto", "sequence_parallel": "auto"}
    plain, auto = (
        write(tmp_path, "a.yaml"),
        write(tmp_path, "b.yaml", parallelism={**PINNED, **later}),
    )
    assert call("estimate", "--json", plain, auto) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert {**first, "recipe": ""} == {**second, "recipe": ""}


def test_plan_warns_of_a_mixture_of_experts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mixture = {**SMALL_LLAMA, "model_type": "mixtral", "num_local_experts": 4}
    path = write(
        tmp_path,
        "moe.yaml",
        model={"config": mixture, "weights": "random"},
        parallelism={"tensor": 1},
    )
    assert call("plan", path) == 0
    assert (
        "warning[SW3132]: 4 experts a layer without expert parallelism" in capsys.readouterr().err
    )
    assert call("estimate", "--json", path) == 0
    assert [d["code"] for d in json.loads(capsys.readouterr().out)["diagnostics"]] == ["SW3132"]


def test_exit_0_where_all_are_feasible(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = write(tmp_path, "good.yaml")
    assert call("estimate", "--json", good, good) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert call("estimate", good) == 0
    assert "tensor=2 pipeline=2 data=2" in capsys.readouterr().out


def test_model_and_cluster_errors_come_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = write(
        tmp_path,
        "bad.yaml",
        model={"config": {**SMALL_LLAMA, "hiden_size": 64}, "weights": "random"},
        cluster={"nodes": 1, "gpus_per_node": 8, "gpu": "h1000"},
    )
    assert call("estimate", "--json", bad) == 1
    (line,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert {d["code"] for d in line["diagnostics"]} == {"SW2005", "SW3001"}


def test_plan_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "auto.yaml", parallelism={})
    assert call("plan", "--json", "--top", "3", path) == 0
    found = json.loads(capsys.readouterr().out)
    keys = {
        "recipe",
        "plans",
        "rejected",
        "slower_regions",
        "pareto",
        "binding",
        "measured_error",
        "search_seconds",
    }
    keys |= {
        "rejected_faster_layouts",
        "skipped",
        "goodput",
        "recovery",
        "low_precision_accumulation",
        "kernels",
        "target",
        "other_engine",
        "scoring",
    }
    assert set(found) == keys
    steps = [plan["time"]["step_seconds"] for plan in found["plans"] if plan["feasible"]]
    assert steps == pytest.approx(sorted(steps))
    plain = {p["strategy"]["zero_stage"] for p in found["plans"] if p["strategy"]["pipeline"] == 1}
    assert {2, 3} <= plain
    assert {"SW3107", "SW3108"} <= {region["code"] for region in found["rejected"]}
    assert all(region["reason"] and region["count"] > 0 for region in found["rejected"])
    assert all(plan["recipe"] == path for plan in found["plans"])


def test_plan_shows_todays_layouts_below_the_pinned_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, "pinned.yaml")
    assert call("plan", "--json", path) == 0
    strategies = [plan["strategy"] for plan in json.loads(capsys.readouterr().out)["plans"]]
    assert [(s["pipeline"], s["zero_stage"]) for s in strategies] == [(2, 1), (1, 2), (1, 3)]


def test_plan_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = {"nodes": 1, "gpus_per_node": 8, "gpu": "a100-sxm4-80gb"}
    path = write(tmp_path, "auto.yaml", parallelism={}, cluster=cluster)
    assert call("plan", "--wide", path) == 0
    out = capsys.readouterr().out
    header, first, second, *_ = out.splitlines()
    assert header.split()[:6] == ["#", "TP", "x", "PP", "x", "DP"]
    assert first.split()[0] == "1" and "GPU-h" in first and second.split()[0] == "2"
    assert "±" in first and re.search(
        r"^± \d+\.\d% \(DeepSpeed.*: \d+ runs.*\).* holds 80 % of", out, re.M
    )
    assert (
        "SW3108" in out
        and "bound by " in out
        and "slower than row 1" in out
        and "make bench-cost" in out
    )
    assert "\x1b" not in out


def test_no_error_and_no_gpu_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cpu = {"nodes": 1, "gpus_per_node": 8, "gpu": "cpu"}
    training = {"sequence_length": 128, "global_batch_size": 16, "steps": 10, "precision": "fp32"}
    path = write(tmp_path, "cpu.yaml", parallelism={}, cluster=cpu, training=training)
    assert call("plan", path) == 0
    out = capsys.readouterr().out
    assert "±" not in out and "no error bar: too few published runs" in out
    assert "tokens/s/rank" in out and "rank-h" in out and "GPU-h" not in out
    assert call("plan", "--wide", path) == 0
    out = capsys.readouterr().out
    assert (
        "±" not in out
        and "not calibrated (a CPU): fewer than 20 published runs of 2 sources are of that kind"
        in out
    )
    assert "tokens/s/rank" in out and "rank-h" in out and "/GPU" not in out and "GPU-h" not in out
    assert call("estimate", path) == 0
    out = capsys.readouterr().out
    assert "±" not in out and "not calibrated (a CPU)" in out and "GPU" not in out
    assert call("plan", "--json", path) == 0
    found = json.loads(capsys.readouterr().out)
    assert (
        found["measured_error"]["step_time"] is None and found["measured_error"]["memory"] is None
    )
    assert {plan["error"]["step_time_reason"] for plan in found["plans"]} == {"a CPU"}


def test_rows_without_an_error_say_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for gpu, known in (("a100-sxm4-80gb", True), ("mi300x-192gb", False)):
        cluster = {"nodes": 2, "gpus_per_node": 8, "gpu": gpu}
        path = write(tmp_path, f"{gpu}.yaml", parallelism={"schedule": "1f1b"}, cluster=cluster)
        assert call("plan", "--wide", "--top", "30", path) == 0
        table, _, notes = capsys.readouterr().out.partition("\n\n")
        header, *rows = table.splitlines()
        assert "ZeRO" in header and rows
        assert all(("±" in row) == known for row in rows)
        assert ("not calibrated (DeepSpeed, plain, CDNA 3)" in notes) != known


def test_large_figures_are_readable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training = {"sequence_length": 128, "global_batch_size": 16, "tokens": 1e15}
    assert call("estimate", write(tmp_path, "long.yaml", training=training)) == 0
    assert re.search(
        r"training 488,281,250,000 steps, [\d,]+ days, [\d,]+ GPU hours\n", capsys.readouterr().out
    )
    epochs = {"sequence_length": 128, "global_batch_size": 16, "epochs": 2}
    data = {"kind": "text", "path": "x.txt", "tokenizer": "byte"}
    assert call("estimate", write(tmp_path, "epochs.yaml", training=epochs, data=data)) == 0
    assert (
        "training 2 epochs: the steps are known once the data is prepared"
        in capsys.readouterr().out
    )


def test_plan_of_what_cannot_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "none.yaml", parallelism={"pipeline": 2, "zero_stage": 3})
    assert call("plan", "--json", path) == 1
    captured = capsys.readouterr()
    assert "SW3108" in captured.err
    found = json.loads(captured.out)
    assert [region["code"] for region in found["rejected"]] == ["SW3108"]


def test_plan_refuses_a_bad_recipe(tmp_path: Path) -> None:
    with pytest.raises(Refusal) as caught:
        call(
            "plan",
            write(tmp_path, "gpu.yaml", cluster={"nodes": 1, "gpus_per_node": 8, "gpu": "h1000"}),
        )
    assert caught.value.source is not None


@pytest.mark.parametrize("source", ["traced", "counted: TypeError: no value"])
def test_flops_that_were_not_traced_are_told(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = graph_of(SMALL_LLAMA)
    last = tuple(dataclasses.replace(layer, flops_source=source) for layer in graph.layers[-2:])
    # A graph of its own, for the cost model remembers what it has worked out of the other.
    untraced = dataclasses.replace(
        graph, layers=(*graph.layers[:-2], *last), config_hash=f"{source} in two layers"
    )
    monkeypatch.setattr(
        "shardwright.compile.recipe_compiler.build_model_graph", lambda section: untraced
    )
    path = write(tmp_path, "r.yaml")
    for command in ("estimate", "plan"):
        assert call(command, *(["--wide"] if command == "plan" else []), path) == 0
        told = capsys.readouterr().out
        for words in ("counted from the parameters' shapes", "(TypeError: no value)"):
            assert (words in told) == (source != "traced")
        assert call(command, "--json", path) == 0
        found = json.loads(capsys.readouterr().out)
        best = found if command == "estimate" else found["plans"][0]
        assert best["flops_source"] == source


def test_plan_says_that_the_batch_keeps_the_cluster_large(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it does is in tests/unit/search/test_deadline.py."""
    smaller = SmallerClusterBatch(global_batch_size=12, nodes=1, days=2.0, cost=None, cost_now=None)
    monkeypatch.setattr(
        "shardwright.cli.plan_command.smaller_cluster_batch", lambda problem, sizing: smaller
    )
    cluster = {"nodes": "auto", "gpus_per_node": 8, "gpu": "h100-sxm-80gb"}
    training = {"sequence_length": 128, "global_batch_size": 16, "steps": 10, "days_at_most": 30}
    path = write(tmp_path, "auto.yaml", parallelism={}, cluster=cluster, training=training)
    words = "the batch of 16 bounds it"
    assert call("plan", path) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert "1 nodes are the fewest" in page and words in page
    assert call("plan", "--wide", path) == 0
    page = capsys.readouterr().out
    assert (
        words in page
        and "global_batch_size" in page.split("nodes are the fewest")[1].splitlines()[1]
    )
    assert call("plan", "--json", path) == 0
    sizing = json.loads(capsys.readouterr().out)["sizing"]
    assert words in sizing["bound"] and sizing["smaller_cluster_batch"]["global_batch_size"] == 12
    larger = sizing["larger_batch"]
    assert larger["global_batch_size"] == 32 and larger["shorter"] == pytest.approx(
        1 - larger["days"] / sizing["days"]
    )


@pytest.mark.parametrize(
    ("peak", "fits", "words"),
    [
        (66.6, True, "(17%)"),
        (460.9, False, "does not fit (5.8x)"),
        (79.9, False, "does not fit (1.00x)"),
    ],
)
def test_what_a_peak_leaves_of_a_device(peak: float, fits: bool, words: str) -> None:
    memory = Memory(peak_bytes=int(peak * 2**30), capacity_bytes=80 * 2**30, fits=fits, stages=())
    assert free_memory_text(memory) == words

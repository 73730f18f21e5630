"""What `plan` prints at the terminal's width: a line a layout and three lines, in a pipe and on a
terminal. tests/recipes/test_recipes.py renders every shipped recipe."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwright.cli import plan_summary
from shardwright.cli.main import main
from shardwright.cli.plan_summary import summary_lines
from shardwright.compile.recipe_compiler import read_problem
from shardwright.layout.layout import Layout
from shardwright.layout.layout_estimate import Estimate
from shardwright.layout.planning_problem import Problem
from shardwright.recipe.literal_types import PartialCheckpointing
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.search.engine_choice import OtherEngine, other_engine
from shardwright.search.layout_search import SearchResult, search
from shardwright.search.rejected_faster_layouts import rejected_faster_layouts
from tests.unit.models.factory import SMALL_LLAMA

LABELS = ["why first", "how sure", "engine"]
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
LAYOUT: dict[str, Any] = {
    "tensor": 2,
    "pipeline": 4,
    "data": 16,
    "zero_stage": 1,
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "activation_checkpointing": "none",
    "schedule": "1f1b",
    "offload": "none",
}


def write(folder: Path, **changes: Any) -> str:
    document = {
        "version": 1,
        "name": "test",
        "model": {"config": SMALL_LLAMA, "weights": "random"},
        "cluster": {"nodes": 1, "gpus_per_node": 8, "gpu": "h100-sxm-80gb"},
        "training": {"sequence_length": 128, "global_batch_size": 16, "steps": 10},
        **changes,
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(document))
    return str(path)


def searched(path: str) -> tuple[Problem, SearchResult]:
    problem = read_problem(load_recipe(Path(path)))
    return problem, search(problem)


def below(
    problem: Problem, result: SearchResult, rows: int = 3, other: OtherEngine | None = None
) -> dict[str, str]:
    """The three lines by their labels."""
    ranked = result.ranked
    rejected = rejected_faster_layouts(problem.recipe, ranked)
    lines = summary_lines(problem, ranked[:rows], result, other, rejected)
    lines = lines[lines.index("") + 1 :]
    return {line[:11].rstrip(): line[11:] for line in lines}


@pytest.mark.parametrize(
    ("changes", "letters"),
    [
        ({}, "TP 2, PP 4, DP 16, ZeRO-1"),
        ({"tensor": 1, "pipeline": 1, "data": 1, "zero_stage": 0}, "DP 1, ZeRO-0"),
        (
            {"context": 2, "expert": 8, "expert_tensor": 1, "virtual_stages": 3},
            "TP 2, PP 4, CP 2, DP 16, EP 8, ETP 1, VPP 3, ZeRO-1",
        ),
        (
            {"sequence_parallel": True, "activation_checkpointing": "selective"},
            "TP 2, PP 4, DP 16, SP, ZeRO-1, SAC",
        ),
        (
            {"activation_checkpointing": PartialCheckpointing(full=3), "micro_batch_size": 4},
            "TP 2, PP 4, DP 16, ZeRO-1, AC 3, MBS 4",
        ),
        (
            {
                "activation_checkpointing": "full",
                "schedule": "dualpipev",
                "offload": "optimizer",
            },
            "TP 2, PP 4, DP 16, ZeRO-1, offload-optimizer, DualPipeV, AC",
        ),
    ],
)
def test_the_letters_of_a_layout(changes: dict[str, Any], letters: str) -> None:
    assert ", ".join(Layout(**{**LAYOUT, **changes}).letters()) == letters


@pytest.mark.parametrize("width", [80, 100, 200])
@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize("no_color", ["", "1"])
def test_the_answer_has_the_width_of_the_terminal(
    width: int,
    is_terminal: bool,
    no_color: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("NO_COLOR", no_color)
    model = ["plan", "Qwen/Qwen3-0.6B", "--gpu", "a100-sxm4-80gb", "--nodes", "1", "--top", "4"]
    for arguments in (model, ["plan", write(tmp_path), "--top", "4"]):
        assert main(arguments) == 0
        out = capsys.readouterr().out
        assert ("\x1b" in out) == (is_terminal and not no_color)
        lines = [ESCAPE.sub("", line) for line in out.splitlines()]
        assert max(map(len, lines)) <= width
        assert [line[:11].rstrip() for line in lines[-3:]] == LABELS
        head = next(i for i, line in enumerate(lines) if line.split()[:1] == ["#"])
        assert lines[head].split() == ["#", "layout", "memory", "step", "tokens/s/GPU", "cost"]
        rows = [line for line in lines[head + 1 : -4] if not set(line) <= {"─"}]
        assert [int(row.split()[0]) for row in rows] == list(range(1, len(rows) + 1))
        assert all("ZeRO-" in row and " GiB " in row and " s " in row for row in rows)


def test_a_pipe_without_columns_has_80(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    path = write(tmp_path)
    assert main(["plan", path]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
    assert main(["plan", path, "--wide"]) == 0
    wide = capsys.readouterr().out
    assert max(map(len, wide.splitlines())) > 80
    assert "slower than row 1:" in wide and "ruled out:" in wide and "MFU" in wide


def test_rows_of_both_tables_are_pinned_by_the_same_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path)
    tables = []
    for flag in ([], ["--wide"]):
        assert main(["plan", path, "--top", "5", *flag]) == 0
        rows = re.findall(r"^ *(\d+)  .*ZeRO-\d|^ *(\d+)  .* x ", capsys.readouterr().out, re.M)
        tables.append([max(row) for row in rows])
    assert tables[0] == tables[1][: len(tables[0])] and len(tables[0]) >= 5


def test_layouts_that_do_not_run_have_no_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, parallelism={"pipeline": 2, "zero_stage": 3})
    assert main(["plan", path]) == 1
    captured = capsys.readouterr()
    assert captured.out == "no layout runs; --wide lists the rules that reject them\n"
    assert "SW3108" in captured.err
    path = write(tmp_path, parallelism={"pipeline": 2, "zero_stage": 1, "tensor": 1})
    assert main(["plan", path]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^ *1  PP ?2", out, re.M) and "ZeRO-3" not in out


def steps(estimate: Estimate, seconds: float, peak: float | None = None) -> Estimate:
    """The estimate with another step, and another share of the memory."""
    time = dataclasses.replace(estimate.time, step_seconds=seconds)
    memory = estimate.memory
    if peak is not None:
        memory = dataclasses.replace(memory, peak_bytes=int(peak * memory.capacity_bytes))
    return dataclasses.replace(estimate, time=time, memory=memory)


def test_why_the_first_is_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    problem, result = searched(write(tmp_path))
    plain = next(e for e in result.ranked if e.strategy.data == 8)
    again = dataclasses.replace(
        plain, strategy=dataclasses.replace(plain.strategy, micro_batch_size=64)
    )
    pipeline = next(e for e in result.ranked if e.strategy.pipeline == 2)

    def why(*ranked: Estimate, rows: int = 3) -> str:
        return below(problem, dataclasses.replace(result, ranked=ranked), rows)["why first"]

    first = steps(plain, 10.0, 0.5)
    assert why(first, steps(again, 11.0, 0.5)).startswith("row 2 takes 10.0% longer")
    assert why(first, steps(again, 10.0, 0.6)) == (
        "row 2 takes as long and needs more memory: 48.0 GiB against 40.0"
    )
    assert why(first, steps(again, 9.0, 0.99)) == "row 2 is 10.0% faster, but may not fit"
    assert why(first, steps(pipeline, 9.9, 0.5)) == (
        "row 2 is 1.0% faster, within the error, but needs a pipeline"
    )
    assert why(first, steps(again, 11.0, 0.5), steps(pipeline, 9.9, 0.5)) == (
        "row 2 takes 10.0% longer; row 3 is 1.0% faster, but more complex"
    )
    assert why(first, steps(again, 11.0, 0.5), rows=1).startswith("the next best takes 10.0%")
    alone = dataclasses.replace(result, ranked=(first,), skipped=())
    assert below(problem, alone)["why first"].startswith("no other layout that runs")


def test_how_sure_says_what_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    problem, result = searched(write(tmp_path))
    best = result.ranked[0]

    def sure(peak: float, **error: Any) -> str:
        estimate = steps(best, 1.0, peak)
        changed = dataclasses.replace(
            estimate,
            error=dataclasses.replace(estimate.error, **error),
        )
        return below(problem, dataclasses.replace(result, ranked=(changed,)))["how sure"]

    assert sure(0.5, step_time=0.234) == (
        "step within 23% for 8 of 10 published runs; 50% of 80 GiB is free"
    )
    assert sure(0.97, step_time=0.234) == (
        "step within 23% for 8 of 10 published runs; memory may run out"
    )
    assert sure(0.5, step_time=None, step_time_reason="LoRA").startswith(
        "no error bar: too few published runs"
    )
    assert sure(1.5, step_time=None) == (
        "no error bar: too few published runs; memory does not fit"
    )
    monkeypatch.setenv("COLUMNS", "200")
    wide = sure(0.97, step_time=0.234)
    assert "3% of memory is free, and predictions are up to 9% too low: it may run out" in wide
    assert "(LoRA)" in sure(0.5, step_time=None, step_time_reason="LoRA")


def test_what_the_other_engine_would_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    problem, result = searched(write(tmp_path))
    best = result.ranked[0]
    strategy = Layout(**LAYOUT)
    known: dict[str, Any] = {
        "target": "megatron",
        "chosen": "deepspeed",
        "automatic": False,
        "strategy": strategy,
        "step_seconds": 63.4,
        "peak_bytes": 2**30,
        "slower": 0.1,
        "wins": False,
        "because": "within the prediction's error, and needs a pipeline",
    }

    def engine(**changes: object) -> str:
        return below(problem, result, other=OtherEngine(**{**known, **changes}))["engine"]

    letters = "with TP 2, PP 4, DP 16, ZeRO-1"
    assert engine() == f"megatron would take 63.4 s (+10.0%) {letters}"
    assert engine(slower=-0.2, wins=True) == (
        "megatron (untested on GPUs) is 20.0% faster: write target: megatron"
    )
    assert engine(slower=-0.1) == ("megatron (untested on GPUs) is 10.0% faster, within the error")
    tight = int(0.99 * best.memory.capacity_bytes)
    assert engine(slower=-0.1, peak_bytes=tight).endswith("10.0% faster, but may not fit")
    assert engine(target="deepspeed", chosen="megatron", slower=-0.1) == (
        "deepspeed is 10.0% faster, within the error, but more complex"
    )
    assert engine(slower=0.0).startswith("megatron would take as long")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"cluster": {"nodes": 1, "gpus_per_node": 8, "gpu": "cpu"}},
            "no other: engines are compared on GPUs only",
        ),
        ({"target": "reference"}, "no other: target: reference stands alone"),
        ({"assume": {"mfu": 0.4}}, "no other: the recipe's assume section describes deepspeed"),
        (
            {"model": {"config": {"model_type": "gpt_neo"}, "weights": "random"}},
            "no other: megatron does not support the model type 'gpt_neo'",
        ),
        (
            {
                "training": {
                    "sequence_length": 128,
                    "global_batch_size": 16,
                    "steps": 10,
                    "precision": "fp16",
                }
            },
            "no other: training.precision: fp16 does not run under target: megatron",
        ),
    ],
)
def test_why_no_other_engine_is_compared(
    changes: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    if changes.get("target") == "reference":
        changes["cluster"] = {"nodes": 1, "gpus_per_node": 1, "gpu": "h100-sxm-80gb"}
    problem, result = searched(write(tmp_path, **changes))
    assert other_engine(problem, result.ranked[0]) is None
    assert below(problem, result)["engine"].startswith(words)


def test_a_row_that_is_too_wide_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    _, result = searched(write(tmp_path))
    long = {**LAYOUT, "context": 2, "expert": 8, "virtual_stages": 3, "sequence_parallel": True}
    best = dataclasses.replace(result.ranked[0], strategy=Layout(**long))
    lines = plan_summary._table([best], 60, is_cpu=False)
    assert len(lines) > 2 and max(map(len, lines)) <= 60
    assert all(part in " ".join(lines) for part in ("TP2", "CP2", "EP8", "VPP3", "SP", "ZeRO-1"))

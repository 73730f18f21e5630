"""A loop of one's own, word for word from the documentation; and what every run leaves: summary,
curves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwright.checkpoint.checkpoint_manifest import read_manifest
from shardwright.compile.compiled_folder import read_folder
from shardwright.cost.goodput import goodput
from shardwright.layout.planning_problem import Problem
from shardwright.train.experiment_trackers import missing_trackers
from shardwright.utils.json_values import copy_shared_fields
from tests.figures import same
from tests.parity.harness import must, shardwright
from tools.pages.page_commands import blocks

pytestmark = pytest.mark.launch
CHANGES = {
    "training.steps": 12,
    "checkpoint": {"every_steps": 5},
    "tracking": {"tensorboard": True, "wandb": {"project": "tests"}},
    "launch.env.WANDB_MODE": "offline",
}


def lines(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]


def test_the_documented_loop_trains_as_run_does(
    write_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    recipe = write_recipe(CHANGES)
    for name in ("theirs", "ours"):
        must(shardwright("compile", recipe, "-o", tmp_path / name))
    must(shardwright("run", tmp_path / "ours"))

    (script,) = (block for block in blocks("docs/python-api.md") if block.language == "python")
    (tmp_path / script.title).write_text(script.text)
    plan = json.loads((tmp_path / "theirs" / "plan.json").read_text())
    deepspeed = Path(sys.executable).with_name("deepspeed")
    command: list[str | Path] = [
        deepspeed,
        "--no_local_rank",
        "--num_gpus",
        str(len(plan["ranks"])),
        tmp_path / "loop.py",
        tmp_path / "theirs",
    ]
    environment = {
        **os.environ,
        "WANDB_MODE": "offline",
        "PATH": f"{deepspeed.parent}:{os.environ['PATH']}",
    }
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr

    ours, theirs = lines(tmp_path / "ours"), lines(tmp_path / "theirs")
    assert [line["step"] for line in theirs] == list(range(1, 13))
    for key in ("loss", "grad_norm", "learning_rate"):
        assert same([line[key] for line in theirs], [line[key] for line in ours])
    for out in (tmp_path / "ours", tmp_path / "theirs"):
        steps = sorted(path.name for path in (out / "checkpoints").glob("step-*"))
        assert steps == ["step-00000005", "step-00000010", "step-00000012"]
        _check_saves(out)
        _check_summary(out)
        _check_curves(out)


def _check_saves(out: Path) -> None:
    """Each was measured, and its ranks wrote what the prediction says, to the byte."""
    found = [json.loads(line) for line in (out / "run" / "saves.jsonl").read_text().splitlines()]
    assert [line["step"] for line in found] == [5, 10, 12]
    subject = read_folder(out)
    predicted = goodput(copy_shared_fields(Problem, subject), subject.estimate)
    assert predicted is not None and predicted.interval_steps == 5
    for line in found:
        path = out / "checkpoints" / f"step-{line['step']:08d}"
        tensors = read_manifest(path).tensors.values()
        elements = [
            len(t.states) * sum(f.numel for shard in t.shards for f in shard) for t in tensors
        ]
        assert 4 * sum(elements) == pytest.approx(predicted.checkpoint_gbytes * 1e9, rel=1e-12)
        files = sum(
            f.stat().st_size for f in path.iterdir() if f.name.startswith(("rank-", "random-"))
        )
        assert line["bytes"] == line["node_bytes"] == files and line["seconds"] > 0


def _check_summary(out: Path) -> None:
    summary = json.loads((out / "run" / "summary.json").read_text())
    plan, metrics = json.loads((out / "plan.json").read_text()), lines(out)
    assert (summary["status"], summary["step"], summary["steps_measured"]) == ("done", 12, 9)
    assert summary["loss"] == {"first": metrics[0]["loss"], "last": metrics[-1]["loss"]}
    assert summary["predicted"]["peak_bytes"] == plan["predicted"]["memory"]["peak_bytes"]
    assert summary["predicted"]["step_seconds"] == plan["predicted"]["time"]["step_seconds"]
    measured = summary["measured"]
    seconds = sorted(line["step_seconds"] for line in metrics[3:])[4]
    assert measured["step_seconds"] == pytest.approx(seconds, rel=1e-6)
    tokens, world = metrics[0]["tokens"], len(plan["ranks"])
    assert measured["tokens_per_second_per_gpu"] == pytest.approx(
        tokens / seconds / world, rel=1e-6
    )
    assert measured["peak_bytes"] > 2**27  # a process with torch in it


def _check_curves(out: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(out / "run" / "tensorboard"))
    events.Reload()
    curve = [(event.step, event.value) for event in events.Scalars("loss")]
    wanted = [(line["step"], line["loss"]) for line in lines(out)]
    assert [step for step, _ in curve] == [step for step, _ in wanted]
    assert [value for _, value in curve] == pytest.approx([value for _, value in wanted], rel=1e-6)
    run_id = json.loads((out / "run" / "tracking.json").read_text())["run_id"]
    assert list((out / "run" / "wandb").glob(f"offline-run-*-{run_id}"))


@pytest.mark.prove
def test_a_run_that_resumes_keeps_its_id(write_recipe: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    must(
        shardwright(
            "compile", write_recipe({**CHANGES, "tracking": {"tensorboard": True}}), "-o", out
        )
    )
    must(shardwright("run", out))
    first = json.loads((out / "run" / "tracking.json").read_text())
    for name in ("step-00000010", "step-00000012"):
        (out / "checkpoints" / name).rename(tmp_path / name)
    must(shardwright("run", out))
    assert json.loads((out / "run" / "tracking.json").read_text()) == first
    _check_curves_once(out)


def _check_curves_once(out: Path) -> None:
    """Steps 6 to 12 were trained twice and stand in the curve once."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(out / "run" / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(1, 13))


def test_a_tracker_that_is_not_installed(
    write_recipe: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardwright.plan.plan import read_plan

    must(shardwright("compile", write_recipe(CHANGES), "-o", tmp_path / "out"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = missing_trackers(read_plan(tmp_path / "out"))
    assert [d.code for d in found] == ["SW6501", "SW6501"]
    assert "wandb" in found[1].message and "shardwright[tracking]" in found[1].help

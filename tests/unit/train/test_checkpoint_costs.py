"""What a save writes is what is predicted, and what it took is recorded, told, and used by the next
compile."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from shardwright.cli import main as cli
from shardwright.compile.compiled_folder import read_folder
from shardwright.cost.goodput import goodput
from shardwright.layout.planning_problem import Problem
from shardwright.monitor.run_files import SaveWriter, read_save_statistics
from shardwright.train.training_session import open_session
from shardwright.utils.json_values import copy_shared_fields
from tests.conftest import SMALL_RECIPE

CONFIG = {**SMALL_RECIPE["model"]["config"], "hidden_size": 256, "intermediate_size": 512}
RECIPE: dict[str, Any] = {
    **SMALL_RECIPE,
    "target": "reference",
    "model": {"config": CONFIG, "weights": "random"},
    "cluster": {"nodes": 1, "gpus_per_node": 1, "gpu": "cpu", "node_mtbf_hours": 1},
    "training": {
        "sequence_length": 16,
        "global_batch_size": 2,
        "steps": 10_000,
        "precision": "bf16",
    },
    "parallelism": {"zero_stage": 0},
    "checkpoint": {"every_steps": "auto"},
}


def compiled(folder: Path, **changes: Any) -> Path:
    (folder / "recipe.json").write_text(json.dumps({**RECIPE, **changes}))
    assert cli.main(["compile", str(folder / "recipe.json"), "-o", str(folder / "out")]) == 0
    return folder / "out"


def predicted(folder: Path) -> Any:
    subject = read_folder(folder)
    return goodput(copy_shared_fields(Problem, subject), subject.estimate)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("changes", [{}, {"lora": {"rank": 64}}], ids=["all", "lora"])
def test_a_folder_has_the_predicted_bytes(
    tmp_path: Path, one_rank: None, changes: dict[str, Any]
) -> None:
    out = compiled(tmp_path, **changes)
    with open_session(out) as session:
        session.train(1)
        session.save()
        session.train(2)
    steps = sorted((out / "checkpoints").glob("step-*"))
    assert [path.name for path in steps] == ["step-00000001", "step-00000002"]
    for path in steps:
        assert predicted(out).checkpoint_gbytes * 1e9 == pytest.approx(size_of(path), rel=0.02)
    lines = [json.loads(line) for line in (out / "run" / "saves.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    for line, path in zip(lines, steps, strict=True):
        written = sum(
            file.stat().st_size
            for file in path.iterdir()
            if file.name.startswith(("rank-", "random-"))
        )
        assert line["bytes"] == line["node_bytes"] == written
        assert 0 < line["seconds"] < 600


def test_the_next_compile_takes_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = compiled(tmp_path)
    first = json.loads((out / "plan.json").read_text())
    assert isinstance(first["checkpoint"]["every_steps"], int)
    assert predicted(out).speed_from == "default"
    (out / "run").mkdir()
    saves = SaveWriter(out, 1, 0)
    for step, seconds in ((10, 4.0), (20, 2.0), (30, 40.0)):
        saves.write(step, seconds, 10**9, 10**9)
    (out / "run" / "saves.jsonl").open("a").write('{"step": 40, "sec')
    measured = read_save_statistics(out)
    assert measured is not None
    assert (measured.count, measured.seconds, measured.gbytes_per_second) == (3, 4.0, 0.25)
    assert read_save_statistics(tmp_path) is None

    capsys.readouterr()
    assert compiled(tmp_path) == out
    assert "0.25 GB/s a node in 3 saves" in capsys.readouterr().out
    second = json.loads((out / "plan.json").read_text())
    assert second["checkpoint"]["every_steps"] > first["checkpoint"]["every_steps"]
    assert (
        json.loads((out / "recipe.resolved.json").read_text())["cluster"][
            "checkpoint_gbytes_per_second"
        ]
        == 0.25
    )
    found = predicted(out)
    assert (found.speed_from, found.interval_steps) == (
        "recipe",
        second["checkpoint"]["every_steps"],
    )
    assert compiled(tmp_path) == out and json.loads((out / "plan.json").read_text()) == second, (
        "the same again"
    )

    # A pinned interval is no matter of what was measured.
    compiled(tmp_path, checkpoint={"every_steps": 7})
    assert json.loads((out / "plan.json").read_text())["checkpoint"]["every_steps"] == 7
    cluster = json.loads((out / "recipe.resolved.json").read_text())["cluster"]
    assert cluster["checkpoint_gbytes_per_second"] is None
    # One that the recipe gives is the recipe's.
    compiled(tmp_path, cluster={**RECIPE["cluster"], "checkpoint_gbytes_per_second": 9.0})
    assert (
        json.loads((out / "recipe.resolved.json").read_text())["cluster"][
            "checkpoint_gbytes_per_second"
        ]
        == 9.0
    )


def test_status_and_explain_tell_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = compiled(tmp_path, checkpoint={"every_steps": 7})
    (out / "run").mkdir()
    capsys.readouterr()

    def told(*command: str) -> Any:
        assert cli.main([command[0], str(out), *command[1:]]) == 0
        return capsys.readouterr().out

    assert "saves" not in told("status") and json.loads(told("status", "--json"))["saves"] is None
    SaveWriter(out, 1, 0).write(7, 0.5, 10**9, 10**9)
    state = json.loads(told("status", "--json"))
    assert state["saves"] == {"count": 1, "seconds": 0.5, "gbytes_per_second": 2.0}
    assert state["predicted_save_seconds"] == predicted(out).save_seconds
    assert "saves    1, 0.5 s each (predicted " in told("status")
    explained = json.loads(told("explain", "--json"))["goodput"]
    assert (explained["speed_from"], explained["checkpoint_gbytes_per_second"]) == ("measured", 2.0)
    (out / "recipe.resolved.json").unlink()  # as folders of earlier versions
    state = json.loads(told("status", "--json"))
    assert state["saves"]["count"] == 1 and state["predicted_save_seconds"] is None
    assert os.environ.get("RANK") is None

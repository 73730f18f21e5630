"""What a folder that is compiled for another number of islands goes on from."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from shardwright.checkpoint.checkpoint_compatibility import (
    compare_requirements,
    resume_requirements,
)
from shardwright.checkpoint.checkpoint_manifest import MANIFEST
from shardwright.checkpoint.resume_checkpoint import check_round_complete, choose_checkpoint
from shardwright.diagnostics import Refusal
from shardwright.monitor.run_files import AttemptRecord, write_attempt_record
from shardwright.plan.plan import Plan, PlanDiLoCo, read_plan
from tests.unit.checkpoint.written_checkpoints import write_checkpoint

OUTER = PlanDiLoCo(
    every_steps=4,
    optimizer="average",
    precision="fp32",
    lr=None,
    momentum=None,
    overlap_steps=0,
    deadline_seconds=60.0,
    islands=2,
    island=0,
)


@pytest.fixture
def out(compiled: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(compiled, tmp_path / "out"))


def island(out: Path, number: int, *steps: int) -> Path:
    """A copy of the compiled folder with these checkpoints."""
    folder = out / f"island-{number}"
    shutil.copytree(out, folder, ignore=shutil.ignore_patterns("island-*", "checkpoints"))
    for step in steps:
        write_checkpoint(folder, step=step)
    return folder


def of_an_island(plan: Plan, **changes: Any) -> Plan:
    return dataclasses.replace(plan, outer=dataclasses.replace(OUTER, **changes))


def refused(plan: Plan, folder: Path) -> str:
    with pytest.raises(Refusal) as raised:
        choose_checkpoint(plan, folder, "auto")
    (problem,) = raised.value.diagnostics
    assert problem.code == "SW6218"
    return problem.help


def between(checkpoint: Path) -> None:
    """As an island saves it between two outer steps."""
    document = json.loads((checkpoint / MANIFEST).read_text())
    for tensor in document["tensors"].values():
        tensor["states"].append("outer_anchor")
    (checkpoint / MANIFEST).write_text(json.dumps(document))


def test_one_world_after_islands(out: Path) -> None:
    plan, folders = read_plan(out), [island(out, 0, 4), island(out, 1, 4, 8), island(out, 10, 8)]
    newest = folders[1] / "checkpoints" / "step-00000008"
    assert f"--resume {newest}" in refused(plan, out)
    between(newest)
    between(folders[2] / "checkpoints" / "step-00000008")
    first = folders[0] / "checkpoints" / "step-00000004"
    assert f"--resume {first}" in refused(plan, out)
    assert choose_checkpoint(plan, out, "never") is None
    between(first)
    between(folders[1] / "checkpoints" / "step-00000004")
    assert "overlap_steps: 0" in refused(plan, out)
    shutil.rmtree(first.parent)
    write_checkpoint(folders[0], step=4)
    found = choose_checkpoint(plan, out, str(first))
    assert found is not None and found.step == 4
    write_checkpoint(out, step=4)
    assert choose_checkpoint(plan, out, "auto") is not None


def test_who_has_trained_further(out: Path) -> None:
    """What was chosen with --resume is not asked again."""
    plan = read_plan(out)
    write_checkpoint(out, step=4)
    further = island(out, 0, 8) / "checkpoints" / "step-00000008"
    assert f"--resume {further}" in refused(plan, out)
    write_attempt_record(out, AttemptRecord(number=2))
    found = choose_checkpoint(plan, out, "auto")
    assert found is not None and found.step == 4


def test_the_middle_of_a_round_is_of_islands_alone(out: Path) -> None:
    checkpoint = island(out, 0, 4) / "checkpoints" / "step-00000004"
    check_round_complete(read_plan(out), checkpoint)
    between(checkpoint)
    with pytest.raises(Refusal, match="SW6218"):
        check_round_complete(read_plan(out), checkpoint)
    check_round_complete(of_an_island(read_plan(out)), checkpoint)


def test_islands_after_one_world(out: Path) -> None:
    plan = of_an_island(read_plan(out))
    first = island(out, 0)
    write_checkpoint(out, step=4)
    assert f"--resume {out / 'checkpoints' / 'step-00000004'}" in refused(plan, first)
    second = island(out, 1, 4)  # beside one that has trained it is a new one, which takes its state
    assert choose_checkpoint(plan, first, "auto") is None
    write_checkpoint(out, step=8)
    assert "step-00000008" in refused(plan, first) and "step-00000008" in refused(plan, second)


def test_a_folder_without_any(out: Path) -> None:
    assert choose_checkpoint(read_plan(out), out, "auto") is None
    assert choose_checkpoint(of_an_island(read_plan(out)), island(out, 0), "auto") is None


def test_the_samples_are_those_of_all_islands(out: Path) -> None:
    plan = read_plan(out)
    half = dataclasses.replace(
        plan,
        training=dataclasses.replace(
            plan.training, global_batch_size=plan.training.global_batch_size // 2
        ),
    )
    assert (
        compare_requirements(
            resume_requirements(plan, out), resume_requirements(of_an_island(half), out)
        ).samples
        == ()
    )
    assert [
        each.key
        for each in compare_requirements(
            resume_requirements(plan, out), resume_requirements(of_an_island(plan), out)
        ).samples
    ] == ["training.global_batch_size"]

"""Metrics of several islands as those of one training."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from shardwright.diloco.island_metrics import MergedStep, merged_steps, missing


def island(folder: Path, losses: dict[int, float | None], tokens: int = 100) -> Path:
    (folder / "run").mkdir(parents=True)
    lines = [
        json.dumps({"step": step, "loss": loss, "tokens": tokens}) for step, loss in losses.items()
    ]
    (folder / "run" / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 9, "lo']) + "\n")
    return folder


def test_losses_are_weighted_by_tokens(tmp_path: Path) -> None:
    folders = {
        0: island(tmp_path / "0", {1: 4.0, 2: 3.0}),
        1: island(tmp_path / "1", {1: 1.0}, tokens=300),
    }
    both, alone = merged_steps(folders, [], 2)
    assert both.loss == pytest.approx(1.75)
    assert (both.step, both.islands, both.tokens) == (1, (0, 1), 400)
    assert alone == MergedStep(step=2, islands=(0,), loss=3.0, tokens=100)


def test_who_took_no_part_in_the_outer_step_does_not_count(tmp_path: Path) -> None:
    steps: dict[int, float | None] = {step: float(step) for step in range(1, 7)}
    folders = {
        0: island(tmp_path / "0", steps),
        1: island(tmp_path / "1", dict.fromkeys(steps, 100.0)),
    }
    rounds = [
        {"step": 2, "members": [0, 1], "joined": [], "seconds": 0.2},
        {"step": 4, "members": [0], "joined": [1], "seconds": 0.2},
    ]
    found = merged_steps(folders, rounds, 2)
    assert [each.islands for each in found] == [(0, 1), (0, 1), (0,), (0,), (0, 1), (0, 1)]
    assert [each.loss for each in found] == [50.5, 51.0, 3.0, 4.0, 52.5, 53.0]


def test_a_loss_that_is_no_number_is_seen(tmp_path: Path) -> None:
    folders = {0: island(tmp_path / "0", {1: None}), 1: island(tmp_path / "1", {1: 2.0})}
    (found,) = merged_steps(folders, [], 10)
    assert math.isnan(found.loss) and found.tokens == 200


def test_islands_that_are_missing() -> None:
    def rounds(*members: list[int]) -> list[dict[str, object]]:
        return [
            {"step": n, "members": each, "joined": [], "seconds": 0.2}
            for n, each in enumerate(members, 1)
        ]

    assert missing(3, rounds([0, 1, 2])) == {}
    assert missing(3, rounds([0, 1, 2], [0, 1], [0])) == {1: 1, 2: 2}
    back = [*rounds([0, 1], [0]), {"step": 3, "members": [0], "joined": [1], "seconds": 0.2}]
    assert missing(2, back) == {}
    assert missing(2, []) == {}

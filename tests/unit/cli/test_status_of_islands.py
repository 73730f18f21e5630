"""`status` of several islands: the whole, and who is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwright.cli.main import main
from tools.pages.page_commands import ROOT


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two islands, of which the second died after step 12 of 60, and an outer step at 10 and one at
    20 without it."""
    out = tmp_path_factory.mktemp("islands") / "out"
    assert main(["compile", str(ROOT / "recipes/tiny-llama-islands-cpu.yaml"), "-o", str(out)]) == 0
    for k, steps in ((0, 20), (1, 12)):
        run = out / f"island-{k}" / "run"
        run.mkdir()
        lines = [
            {"step": s, "loss": 5.0 - k, "tokens": 1000, "step_seconds": 0.5, "attempt": 1}
            for s in range(1, steps + 1)
        ]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (run / "attempt.json").write_text(json.dumps({"attempt": 1, "steps": 60}))
        (run / "status.json").write_text(
            json.dumps({"status": "failed", "attempt": 1, "cause": "killed"})
        )
    rounds = [
        {"step": 10, "members": [0, 1], "joined": [], "seconds": 0.2},
        {"step": 20, "members": [0], "joined": [], "seconds": 0.2},
    ]
    (out / "run").mkdir(exist_ok=True)
    (out / "run" / "rounds.jsonl").write_text(
        "".join(json.dumps({**r, "seconds": 0.25}) + "\n" for r in rounds)
    )
    return out


def status(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(["status", str(folder), *words]) == 0
    return capsys.readouterr().out


def test_the_whole(compiled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole: dict[str, Any] = json.loads(status(compiled, capsys, "--json"))["whole"]
    assert (whole["step"], whole["steps"], whole["islands"]) == (20, 60, [0])
    assert whole["loss"] == 5.0 and whole["tokens"] == 10 * 2000 + 10 * 1000
    assert whole["tokens_per_second"] == pytest.approx(2000)
    assert whole["missing"] == [{"island": 1, "outer_steps": 1}] and whole["outer_steps"] == 2
    text = status(compiled, capsys)
    assert "missing  island 1, for 1 outer step (failed)" in text
    assert "outer    2 outer steps, the last at step 20, islands 0, 0.25 s in the store" in text
    assert text.count("cause    killed") == 2 and "island 1\n" in text


def test_an_island_that_is_elsewhere(compiled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    away = (compiled / "island-1").rename(compiled.parent / "away")
    try:
        assert "island 1, for 1 outer step (elsewhere)" in status(compiled, capsys)
    finally:
        away.rename(compiled / "island-1")

"""What `prepare` says of pictures a second holds: a rank whose steps take as long as planned never waits for them."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from shardwright.cli.main import main
from shardwright.compile import compile_recipe
from shardwright.data.dataset import open_dataset
from shardwright.data.decoder import Decoders
from shardwright.data.picture_rate import picture_rate
from shardwright.data.prepare import prepare
from shardwright.data.sight import Sight
from shardwright.lower.folder import write_folder
from shardwright.modules.batches import Batches, sight_of
from shardwright.plan.plan import Plan
from shardwright.plan.serialize import read_plan
from shardwright.recipe.load import load_recipe
from tests.parity.sight import TEXT, SightCase, recipe

ROWS, STEPS = 32, 8


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """A compiled folder for one rank whose rows have a picture of 640 x 480 pixels each, but for every fourth."""
    records = []
    for row in range(ROWS):
        Image.effect_noise((640, 480), 80).convert("RGB").save(tmp_path / f"{row}.jpg")
        parts = [{"type": "image", "image": f"{row}.jpg"}] if row % 4 else []
        question = {"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}
        answer = {"role": "assistant", "content": [{"type": "text", "text": "noise"}]}
        records.append({"messages": [question, answer]})
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    document = recipe(SightCase("llava", steps=STEPS))
    document["data"]["images"]["max_pixels"] = 640 * 480
    wide = {**TEXT, "hidden_size": 768, "intermediate_size": 2048, "head_dim": 192, "num_hidden_layers": 8}
    document["model"]["config"]["text_config"] |= wide  # nothing of it runs: steps of a second are planned
    (tmp_path / "recipe.json").write_text(json.dumps(document))
    write_folder(tmp_path / "out", compile_recipe(load_recipe(tmp_path / "recipe.json")).files)
    prepare(read_plan(tmp_path / "out"), tmp_path / "out", limit_bytes=None)
    return tmp_path / "out"


def faster(plan: Plan, times: float) -> Plan:
    seconds = dataclasses.replace(plan.predicted.time, step_seconds=plan.predicted.time.step_seconds / times)
    return dataclasses.replace(plan, predicted=dataclasses.replace(plan.predicted, time=seconds))


def test_cores_follow_from_the_planned_steps(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at = iter(range(10**6))
    monkeypatch.setattr(time, "process_time", lambda: next(at) * 0.48)  # for 24 pictures
    plan = read_plan(prepared)
    found = picture_rate(plan, prepared)
    assert found is not None and found.per_core == pytest.approx(50)
    assert found.wanted == pytest.approx(8 * 0.75 / plan.predicted.time.step_seconds)
    assert (found.cores, found.ranks) == (1, 1) and found.wanted < 50
    often = picture_rate(faster(plan, 200 / found.wanted), prepared)
    assert often is not None and often.wanted == pytest.approx(200) and often.cores in (4, 5)


def test_prepare_prints_it(prepared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", str(prepared)]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("pictures "))
    assert "a core of this machine decodes and prepares" in line and "1 core in all" in line
    assert main(["prepare", str(prepared), "--json"]) == 0
    said: dict[str, Any] = json.loads(capsys.readouterr().out)["pictures"]
    assert said["cores"] == 1 and said["per_core"] > said["wanted"] > 0


@pytest.mark.alone
def test_the_queue_never_empties(prepared: Path) -> None:
    """One rank, one process that decodes, steps that sleep as long as planned."""
    plan = read_plan(prepared)
    rate = picture_rate(plan, prepared)
    assert rate is not None and rate.cores == 1
    sight = sight_of(plan, prepared)
    assert isinstance(sight, Sight) and sight.decoders is None
    sight.decoders = Decoders(1)
    batches = Batches(plan, open_dataset(plan, prepared), sight)
    assert sum(m.beside["pixel_values"].shape[0] for m in batches.micro_batches(1, 0) if m.beside) == 6
    for step in range(2, STEPS + 1):
        time.sleep(plan.predicted.time.step_seconds)
        assert batches.ready(step, 0), step
        batches.micro_batches(step, 0)

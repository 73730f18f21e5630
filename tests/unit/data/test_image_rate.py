"""What `prepare` says of pictures a second holds: a rank whose steps take as long as planned never
waits for them."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from shardwright.cli.main import main
from shardwright.compile.compiled_folder import write_folder
from shardwright.compile.recipe_compiler import compile_recipe
from shardwright.data import image_inputs
from shardwright.data.data_preparation import prepare
from shardwright.data.data_summary import image_throughput
from shardwright.data.dataset import open_dataset
from shardwright.data.image_decoder import ImageDecoders
from shardwright.data.image_files import ImageSource, decode
from shardwright.data.image_inputs import ImageProcessor
from shardwright.parallel.micro_batches import TrainingBatches, build_image_processor
from shardwright.plan.plan import Plan, read_plan
from shardwright.recipe.recipe_loader import load_recipe
from tests.cli.command import tree
from tests.parity.vision_language import TEXT, VlmCase, recipe, write_pictures

ROWS, STEPS = 32, 8


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    return ready(tmp_path, (640, 480))


def ready(folder: Path, size: tuple[int, int]) -> Path:
    """A compiled folder for one rank whose rows have a picture of that size each, but for every
    fourth."""
    records = []
    for row in range(ROWS):
        Image.effect_noise(size, 80).convert("RGB").save(folder / f"{row}.jpg")
        parts = [{"type": "image", "image": f"{row}.jpg"}] if row % 4 else []
        question = {"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}
        answer = {"role": "assistant", "content": [{"type": "text", "text": "noise"}]}
        records.append({"messages": [question, answer]})
    (folder / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    document = recipe(VlmCase("llava", steps=STEPS))
    document["data"]["images"]["max_pixels"] = size[0] * size[1]
    wide = {
        **TEXT,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "head_dim": 192,
        "num_hidden_layers": 8,
    }
    document["model"]["config"]["text_config"] |= (
        wide  # nothing of it runs: steps of a second are planned
    )
    (folder / "recipe.json").write_text(json.dumps(document))
    write_folder(folder / "out", compile_recipe(load_recipe(folder / "recipe.json")).files)
    prepare(read_plan(folder / "out"), folder / "out", limit_bytes=None)
    return folder / "out"


def faster(plan: Plan, times: float) -> Plan:
    seconds = dataclasses.replace(
        plan.predicted.time, step_seconds=plan.predicted.time.step_seconds / times
    )
    return dataclasses.replace(plan, predicted=dataclasses.replace(plan.predicted, time=seconds))


def test_cores_follow_from_the_planned_steps(
    prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = iter(range(10**6))
    monkeypatch.setattr(time, "process_time", lambda: next(at) * 0.48)  # for 24 pictures
    plan = read_plan(prepared)
    found = image_throughput(plan, prepared)
    assert found is not None and found.images_per_core_second == pytest.approx(50)
    assert found.wanted == pytest.approx(8 * 0.75 / plan.predicted.time.step_seconds)
    assert (found.cores, found.ranks) == (1, 1) and found.wanted < 50
    often = image_throughput(faster(plan, 200 / found.wanted), prepared)
    assert often is not None and often.wanted == pytest.approx(200) and often.cores in (4, 5)


def test_prepare_prints_it(prepared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", str(prepared)]) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = (line for line in lines if line.startswith("images "))
    assert "a core of this machine decodes and prepares" in line and "1 core in all" in line
    assert any(line.startswith("  32 conversations with 24 images; ") for line in lines)
    (row,) = (line for line in lines if line.startswith("chat ") and line.endswith(" 0"))
    assert "%" in row and "[[noise" in "\n".join(lines)
    assert main(["prepare", str(prepared), "--json"]) == 0
    said: dict[str, Any] = json.loads(capsys.readouterr().out)["images"]
    assert said["cores"] == 1 and said["images_per_core_second"] > said["wanted"] > 0


def test_check_counts_damaged_images(prepared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (prepared.parent / "1.jpg").write_bytes(b"no image")
    before = tree(prepared.parent)
    assert main(["prepare", str(prepared), "--check", "6"]) == 1
    captured = capsys.readouterr()
    assert "1: a damaged image (SW6134)" in captured.out and "SW6153" in captured.err
    assert "data.jsonl:2: " in captured.out and captured.out.count("[[noise") == 3
    assert tree(prepared.parent) == before


@pytest.mark.prove
def test_the_queue_never_empties(prepared: Path) -> None:
    """One rank, one process that decodes, steps that sleep as long as planned."""
    figures = slept(prepared)
    assert figures["waits"] == 0, figures


@pytest.mark.prove
def test_the_queue_never_empties_of_large_pictures(
    tmp_path: Path, proved: Callable[..., None]
) -> None:
    """1920 x 1080 noise, which JPEG hardly makes smaller: the slowest that a camera's picture of
    that size could be."""
    figures = slept(ready(tmp_path, (1920, 1080)))
    proved("decoding", "1920 x 1080, one rank, one process", figures)
    assert figures["waits"] == 0, figures


def test_a_step_that_comes_too_early_is_counted(prepared: Path) -> None:
    """What the counter is for: steps of no length wait every time."""
    assert slept(prepared, times=10**6)["waits"] == STEPS - 1


def slept(folder: Path, times: float = 1.0) -> dict[str, float]:
    """A run whose steps sleep as long as planned, or are so many times as fast, with one process
    that decodes."""
    plan = read_plan(folder)
    rate = image_throughput(plan, folder)
    assert rate is not None and rate.cores == 1
    processor = build_image_processor(plan, folder, 0)
    assert isinstance(processor, ImageProcessor) and processor.decoders is not None
    processor.decoders = ImageDecoders(1)
    batches, seconds = (
        TrainingBatches(plan, open_dataset(plan, folder), processor),
        plan.predicted.time.step_seconds / times,
    )
    begun = time.monotonic()
    shown = 0
    for step in range(1, STEPS + 1):
        shown += sum(
            m.beside["pixel_values"].shape[0] for m in batches.micro_batches(step, 0) if m.beside
        )
        if step == 1:
            begun = time.monotonic()  # nothing was asked for ahead of it
        time.sleep(seconds)
    assert shown == ROWS * 3 // 4 * (STEPS * 8) // ROWS
    return {
        "waits": batches.waits,
        "steps": STEPS,
        "pictures": shown,
        "step_seconds": seconds,
        "seconds": time.monotonic() - begun,
        "pictures_per_second_a_core": rate.images_per_core_second,
        "pictures_per_second_planned": rate.wanted,
    }


def test_only_the_first_stage_decodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted on each rank of pipeline 2 x data 2."""
    write_pictures(tmp_path)
    document = recipe(VlmCase("llava", pipeline=2, data=2))
    (tmp_path / "recipe.json").write_text(json.dumps(document))
    write_folder(tmp_path / "out", compile_recipe(load_recipe(tmp_path / "recipe.json")).files)
    plan = read_plan(tmp_path / "out")
    prepare(plan, tmp_path / "out", limit_bytes=None)
    counts = [0] * 4
    for rank in plan.ranks:

        def counted(picture: ImageSource, most: int, rank: int = rank.rank) -> Any:
            counts[rank] += 1
            return decode(picture, most)

        monkeypatch.setattr(image_inputs, "decode", counted)
        monkeypatch.setattr(
            ImageDecoders,
            "decode",
            lambda _, pictures, most, counted=counted: [counted(p, most) for p in pictures],
        )
        batches = TrainingBatches(
            plan,
            open_dataset(plan, tmp_path / "out"),
            build_image_processor(plan, tmp_path / "out", rank.rank),
        )
        batches._steps = 1  # nothing ahead: what is counted is this step's
        batches.micro_batches(1, rank.data)
    first = [rank.rank for rank in plan.ranks if rank.pipeline == 0]
    assert sum(counts) == 8, counts  # of eight rows with 1, 2, 0 and 1 pictures
    assert all((counts[rank] > 0) == (rank in first) for rank in range(4)), counts

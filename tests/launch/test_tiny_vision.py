"""`recipes/tiny-vision-cpu.yaml` as it stands: four ranks learn to name shapes, and see them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from shardwright.checkpoint.text_generation import GenerationRequest, answer, open_model
from shardwright.data.shapes_dataset import QUESTION, SEED, SHAPES, SIDE, draw_shapes
from tests.parity.harness import metrics, must, newest_checkpoint, shardwright

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny-vision-cpu.yaml"
HELD_OUT = 50


@pytest.mark.prove
@pytest.mark.launch
def test_it_names_shapes_that_it_has_not_seen(
    tmp_path: Path, proved: Callable[[str, str, dict[str, Any]], None]
) -> None:
    out = tmp_path / "out"
    must(shardwright("compile", RECIPE, "-o", out))
    begun = time.monotonic()
    must(shardwright("run", out, timeout=1500))
    seconds = time.monotonic() - begun
    losses = [line["loss"] for line in metrics(out)]
    assert len(losses) == 250 and sum(losses[-10:]) < 0.1 * sum(losses[:10])

    pictures = draw_shapes(tmp_path / "held-out", HELD_OUT, SEED + 1).parent / "pictures"
    blank = tmp_path / "blank.png"
    Image.new("RGB", (SIDE, SIDE)).save(blank)
    step = newest_checkpoint(out)
    shown = [(path, path.stem.partition("-")[2]) for path in sorted(pictures.iterdir())]
    assert len(shown) == HELD_OUT and {shape for _, shape in shown} == set(SHAPES)
    model = open_model(step)

    def named(picture: Path) -> str:
        wish = GenerationRequest(
            prompt=QUESTION, tokens=10, temperature=0.0, seed=0, images=(picture,)
        )
        return answer(model, wish, step).text.partition("\n")[0]

    right = sum(named(path) == shape for path, shape in shown)
    of_blank = named(blank)
    by_chance = sum(shape == of_blank for _, shape in shown)
    assert right >= 0.9 * HELD_OUT, right
    assert by_chance <= 0.3 * HELD_OUT, by_chance
    said = must(
        shardwright(
            "generate", step, "--prompt", QUESTION, "--image", shown[0][0], "--tokens", 10, "--json"
        )
    )
    assert json.loads(said.stdout)["text"].partition("\n")[0] == named(shown[0][0])
    proved(
        "tiny-vision",
        "recipes/tiny-vision-cpu.yaml",
        {
            "right": right,
            "blanked": by_chance,
            "of": HELD_OUT,
            "seconds": round(seconds),
            "loss": losses[-1],
        },
    )

"""Draw the built-in image data set (`path: drawn-shapes`): white shapes on black, with
conversations that name them.

`python -m shardwright.data.shapes_dataset DIR` draws others, to test a trained model on.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

SHAPES = ("circle", "square", "triangle", "plus")
QUESTION = "What is it?"
SIDE = 32
"""Side of an image (pixels)."""
LEAST, MOST = 0.28, 0.45
"""Smallest and largest half side of a shape, as a share of the image's side."""
COUNT, SEED = 2048, 1
"""Images and seed of `path: drawn-shapes`."""


def draw(shape: str, generator: random.Random) -> Image:
    """Draw a shape of random size and position."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (SIDE, SIDE))
    half = generator.uniform(LEAST * SIDE, MOST * SIDE)
    x, y = (generator.uniform(half + 1, SIDE - half - 1) for _ in range(2))
    box, pen, third = (x - half, y - half, x + half, y + half), ImageDraw.Draw(image), half / 3
    if shape == "circle":
        pen.ellipse(box, fill="white")
    elif shape == "square":
        pen.rectangle(box, fill="white")
    elif shape == "triangle":
        pen.polygon([(x, y - half), (x - half, y + half), (x + half, y + half)], fill="white")
    else:
        pen.rectangle((x - third, y - half, x + third, y + half), fill="white")
        pen.rectangle((x - half, y - third, x + half, y + third), fill="white")
    return image


def draw_shapes(folder: Path, count: int = COUNT, seed: int = SEED) -> Path:
    """Write data.jsonl and its images in `folder`, the same bytes for the same seed; existing data
    stays.

    Shapes alternate, so that each occurs equally often.
    """
    written = folder / "data.jsonl"
    if written.is_file():
        return written
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        generator, lines = random.Random(seed), []
        (partial / "pictures").mkdir()
        for number in range(count):
            shape = SHAPES[number % len(SHAPES)]
            name = f"pictures/{number:05d}-{shape}.png"
            draw(shape, generator).save(partial / name)
            question = [{"type": "image", "image": name}, {"type": "text", "text": QUESTION}]
            answer = [{"type": "text", "text": shape}]
            messages = [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
            lines.append(json.dumps({"messages": messages}))
        (partial / written.name).write_text("\n".join(lines) + "\n", encoding="utf-8")
        partial.chmod(0o755)
        os.rename(partial, folder)
    except OSError:
        if not written.is_file():  # another process has drawn them
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=draw_shapes.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument(
        "--seed", type=int, default=SEED + 1, help=f"{SEED} draws what `path: drawn-shapes` has"
    )
    args = parser.parse_args()
    print(draw_shapes(args.folder, args.count, args.seed))


if __name__ == "__main__":
    main()

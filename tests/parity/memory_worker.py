"""One process on the CPU: two steps of a recipe with a large vocabulary, and how far its memory
rose over them.

argv: recipe, folder. Prints bytes.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import deepspeed
from deepspeed import ops

from shardwright.compile.recipe_compiler import compile_recipe
from shardwright.data.dataset import open_dataset
from shardwright.engines.deepspeed.deepspeed_trainers import build_trainer
from shardwright.parallel.micro_batches import TrainingBatches
from shardwright.recipe.recipe_loader import load_recipe


def peak_bytes() -> int:
    """Return this program's own peak: getrusage's starts at that of the parent process."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def main() -> None:
    recipe, folder = Path(sys.argv[1]), Path(sys.argv[2])
    ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    compiled = compile_recipe(load_recipe(recipe))
    for name, content in compiled.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    trainer = build_trainer(compiled.plan, folder)
    batches = TrainingBatches(compiled.plan, open_dataset(compiled.plan, folder))
    before = peak_bytes()
    for step in (1, 2):
        trainer.step(batches.micro_batches(step, 0), 1e-3)
    print(f"rose {peak_bytes() - before}")


if __name__ == "__main__":
    main()

"""Under the `deepspeed` launcher: one case whose rows have pictures, compiled and trained as the
other cases are.

All cases of a launch share one folder of pictures.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deepspeed import comm as dist

from shardwright.data.data_preparation import prepare
from shardwright.data.dataset import open_dataset
from shardwright.engines.deepspeed.deepspeed_trainers import build_trainer
from shardwright.engines.trainer_protocol import StepResult, Trainer
from shardwright.parallel.learning_rate import learning_rate
from shardwright.parallel.micro_batches import TrainingBatches, build_image_processor
from shardwright.plan.plan import Plan
from tests.parity.engine_groups import compile_folder


def trained(
    document: dict[str, Any],
    folder: Path,
    pictures: Path,
    write: Callable[[Path], object],
    rows: int | None = None,
) -> tuple[Plan, Trainer, list[StepResult]]:
    """Collective. write: the pictures and data.jsonl, once a launch; rows: that the training has,
    where none may be left out."""
    rank = dist.get_rank()
    if rank == 0:
        folder.mkdir(parents=True)
        if not pictures.exists():
            pictures.mkdir()
            write(pictures)
        document["data"]["path"] = str(pictures / "data.jsonl")
        (folder / "recipe.yaml").write_text(json.dumps(document))
    plan = compile_folder(folder)
    if rank == 0:
        prepare(plan, folder, limit_bytes=None)
    dist.barrier()
    trainer = build_trainer(plan, folder)
    data = open_dataset(plan, folder)
    assert rows is None or len(data.train) == rows, f"{rows - len(data.train)} rows are left out"
    batches = TrainingBatches(plan, data, build_image_processor(plan, folder))
    results, steps = [], plan.training.steps
    for step in range(1, steps + 1):
        rate = learning_rate(plan.optimizer, plan.scheduler, steps, step)
        results.append(trainer.step(batches.micro_batches(step, plan.ranks[rank].data), rate))
    return plan, trainer, results

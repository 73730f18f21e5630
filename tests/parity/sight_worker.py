"""Under the `deepspeed` launcher: the cases of tests/parity/test_sight.py of one world size, in one launch."""

from __future__ import annotations

import json
from pathlib import Path

from deepspeed import comm as dist

from shardwright.compile import compile_recipe
from shardwright.data.dataset import open_dataset
from shardwright.data.prepare import prepare
from shardwright.engines.deepspeed.trainer import build_trainer
from shardwright.modules.batches import Batches, sight_of
from shardwright.modules.learning_rate import learning_rate
from shardwright.recipe.load import load_recipe
from tests.figures import training_apart
from tests.parity.cases_worker import main
from tests.parity.sight import STEPS, SightCase, recipe, reference, write_pictures


def measure(case: SightCase, folder: Path) -> dict[str, float]:
    rank, pictures = dist.get_rank(), folder.parents[1] / "pictures"
    if rank == 0:
        folder.mkdir(parents=True)
        if not pictures.exists():
            pictures.mkdir()
            write_pictures(pictures)
        document = recipe(case)
        document["data"]["path"] = str(pictures / "data.jsonl")
        (folder / "recipe.yaml").write_text(json.dumps(document))
    dist.barrier()
    made = compile_recipe(load_recipe(folder / "recipe.yaml"))
    if rank == 0:
        for name, content in made.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        prepare(made.plan, folder, limit_bytes=None)
    dist.barrier()
    plan, trainer = made.plan, build_trainer(made.plan, folder)
    batches = Batches(plan, open_dataset(plan, folder), sight_of(plan, folder))
    results = []
    for step in range(1, STEPS + 1):
        rate = learning_rate(plan.optimizer, plan.scheduler, STEPS, step)
        results.append(trainer.step(batches.micro_batches(step, plan.ranks[rank].data), rate))
    wanted = reference(case.model, case.tied, pictures, folder / "tokenizer")
    return training_apart([r.loss for r in results], [r.grad_norm for r in results], wanted)


if __name__ == "__main__":
    main(measure, SightCase)

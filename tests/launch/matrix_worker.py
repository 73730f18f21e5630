"""Under the `deepspeed` launcher: trains layouts and saves them, or resumes the saved ones on other
layouts.

SHARDWRIGHT_MATRIX_OUT holds work.json: {"save": [layout...], "load": [[from, to]...]}; losses go to
losses.json.
"""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed import ops

from shardwright.checkpoint.checkpoint_loader import load_checkpoint
from shardwright.checkpoint.checkpoint_saver import save_checkpoint
from shardwright.compile.compiled_folder import write_folder
from shardwright.compile.recipe_compiler import compile_recipe
from shardwright.data.dataset import open_dataset
from shardwright.engines.deepspeed.deepspeed_trainers import build_trainer
from shardwright.engines.trainer_protocol import Trainer
from shardwright.parallel.context_parallel import CONTEXT_PARALLEL
from shardwright.parallel.learning_rate import learning_rate
from shardwright.parallel.micro_batches import TrainingBatches
from shardwright.parallel.tensor_parallel_collectives import seed_dropout
from shardwright.plan.plan import Plan, read_plan
from shardwright.recipe.recipe_loader import load_recipe
from shardwright.train.training_worker import leave
from tests.launch.resume_matrix import LAST, SAVED, case
from tests.parity import harness
from tests.parity.engine_groups import share_groups

OUT = Path(os.environ["SHARDWRIGHT_MATRIX_OUT"])


def folder_of(name: str) -> Path:
    return OUT / name.replace(" ", "-")


def compiled(name: str) -> tuple[Plan, Path]:
    folder = folder_of(name)
    if dist.get_rank() == 0 and not folder.exists():
        harness.STEPS = LAST
        harness.write_inputs(case(name), folder)
        write_folder(folder / "out", compile_recipe(load_recipe(folder / "recipe.yaml")).files)
    dist.barrier()
    return read_plan(folder / "out"), folder / "out"


def train(
    plan: Plan, trainer: Trainer, batches: TrainingBatches, first: int, last: int
) -> list[float]:
    losses = []
    for step in range(first, last + 1):
        rate = learning_rate(plan.optimizer, plan.scheduler, plan.training.steps, step)
        micro_batches = batches.micro_batches(step, plan.ranks[dist.get_rank()].data)
        losses.append(trainer.step(micro_batches, rate).loss)
    return losses


def main() -> None:
    work = json.loads((OUT / "work.json").read_text())
    losses: dict[str, list[float]] = {}
    targets: dict[str, list[str]] = {name: [] for name in work["save"]}
    for source, target in work["load"]:
        targets.setdefault(target, []).append(source)
    ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    share_groups()
    for name, sources in targets.items():
        CONTEXT_PARALLEL.use(None)  # the compile runs a tiny copy, whole
        plan, folder = compiled(name)
        trainer = build_trainer(plan, folder)
        batches = TrainingBatches(plan, open_dataset(plan, folder))
        seed_dropout(plan, dist.get_rank())
        if not sources:
            train(plan, trainer, batches, 1, SAVED)
            save_checkpoint(plan, folder, trainer, SAVED)
            losses[name] = train(plan, trainer, batches, SAVED + 1, LAST)
        for source in sources:  # one engine: whatever the last resume left in it must be gone
            saved = folder_of(source) / "out" / "checkpoints" / f"step-{SAVED:08d}"
            assert load_checkpoint(plan, trainer, saved) == SAVED
            losses[f"{source} -> {name}"] = train(plan, trainer, batches, SAVED + 1, LAST)
        trainer.engine.destroy()
        del trainer
        gc.collect()
    if dist.get_rank() == 0:
        path = OUT / "losses.json"
        before = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(before | losses))
        (OUT / f"done-{dist.get_world_size()}").touch()
    dist.barrier()
    dist.destroy_process_group()
    leave(0)


if __name__ == "__main__":
    main()

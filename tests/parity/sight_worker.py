"""Under the `deepspeed` launcher: the cases of tests/parity/test_sight.py of one world size, in one launch."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from deepspeed import comm as dist

from shardwright.compile import compile_recipe
from shardwright.data.dataset import open_dataset
from shardwright.data.prepare import prepare
from shardwright.engines.deepspeed.trainer import build_trainer
from shardwright.engines.protocol import Trainer
from shardwright.hf.reference import Reference
from shardwright.ir.apart import tensor_apart, worst
from shardwright.modules.batches import Batches, sight_of
from shardwright.modules.learning_rate import learning_rate
from shardwright.modules.lora import plain_name
from shardwright.plan.plan import Plan
from shardwright.recipe.load import load_recipe
from tests.figures import training_apart
from tests.parity.cases_worker import main
from tests.parity.sight import ROWS, SightCase, recipe, reference, write_pictures


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
    data = open_dataset(plan, folder)
    assert len(data.train) == ROWS, f"{ROWS - len(data.train)} rows are left out"
    batches = Batches(plan, data, sight_of(plan, folder))
    results = []
    for step in range(1, case.steps + 1):
        rate = learning_rate(plan.optimizer, plan.scheduler, case.steps, step)
        results.append(trainer.step(batches.micro_batches(step, plan.ranks[rank].data), rate))
    wanted = reference(case.model, case.tied, pictures, folder / "tokenizer", tuple(case.freeze), case.lora, case.steps)
    figures = training_apart([r.loss for r in results], [r.grad_norm for r in results], wanted)
    return {**figures, "weights": weights_of_ranks(plan, trainer, wanted)}


def weights_of_ranks(plan: Plan, trainer: Trainer, wanted: Reference) -> float:
    """Collective. How far the parameters that the ranks own are from one process's; infinite where one is owned
    nowhere."""
    splits = {p.name: p for module in plan.tensor_parallel.modules for p in module.parameters}
    at = plan.ranks[dist.get_rank()].tensor
    apart, found = [], set()
    weights = {plain_name(name): value for name, value in wanted.weights.items()}
    for fragment in trainer.owned():
        if fragment.name not in weights:
            continue  # a buffer
        value, split = weights[fragment.name], splits.get(fragment.name)
        if split is not None and split.dimension is not None:
            value = torch.cat([value.narrow(split.dimension, *piece) for piece in split.pieces(at)], split.dimension)
        states = fragment.states
        own = states["fp32"] if "fp32" in states else states["value"]
        apart.append(tensor_apart(own.view(-1), value.reshape(-1)[fragment.start : fragment.start + own.numel()]))
        found.add(fragment.name)
    everyone: list[set[str]] = [set()] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    return worst(apart) if set().union(*everyone) == weights.keys() else math.inf


if __name__ == "__main__":
    main(measure, SightCase)

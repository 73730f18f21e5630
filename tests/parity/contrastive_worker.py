"""Under the `deepspeed` launcher: the cases of tests/parity/test_contrastive.py of one world size, in one launch."""

from __future__ import annotations

import json
import math
from pathlib import Path

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
from shardwright.recipe.load import load_recipe
from tests.figures import training_apart
from tests.parity.cases_worker import main
from tests.parity.contrastive import PairCase, recipe, reference, without_gradient, write_pairs


def measure(case: PairCase, folder: Path) -> dict[str, float]:
    rank, pictures = dist.get_rank(), folder.parents[1] / "pairs"
    if rank == 0:
        folder.mkdir(parents=True)
        if not pictures.exists():
            pictures.mkdir()
            write_pairs(pictures)
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
    for step in range(1, case.steps + 1):
        rate = learning_rate(plan.optimizer, plan.scheduler, case.steps, step)
        results.append(trainer.step(batches.micro_batches(step, plan.ranks[rank].data), rate))
    wanted = reference(
        case.model, pictures, folder / "tokenizer", case.steps, tuple("vision_model" for _ in case.freeze)
    )
    figures = training_apart([r.loss for r in results], [r.grad_norm for r in results], wanted)
    return {**figures, "weights": weights_of_ranks(trainer, wanted)}


def weights_of_ranks(trainer: Trainer, wanted: Reference) -> float:
    """Collective. How far the parameters that the ranks own are from one process's, keys' biases apart; infinite where
    one is owned nowhere."""
    apart, found = [0.0], set()
    for fragment in trainer.owned():
        if fragment.name not in wanted.weights:
            continue  # a buffer
        found.add(fragment.name)
        if without_gradient(fragment.name):
            continue
        own = fragment.states["fp32"] if "fp32" in fragment.states else fragment.states["value"]
        value = wanted.weights[fragment.name].reshape(-1)[fragment.start : fragment.start + own.numel()]
        apart.append(tensor_apart(own.view(-1), value))
    everyone: list[set[str]] = [set()] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    return worst(apart) if set().union(*everyone) == wanted.weights.keys() else math.inf


if __name__ == "__main__":
    main(measure, PairCase)

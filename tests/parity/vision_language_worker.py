"""Under the `deepspeed` launcher: the cases of test_vision_language.py of one world size, in one
launch."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from deepspeed import comm as dist

from shardwright.engines.trainer_protocol import Trainer
from shardwright.parallel.lora_adapters import hf_parameter_name
from shardwright.plan.plan import Plan
from shardwright.utils.numeric_difference import largest_difference, max_abs_diff
from shardwright.verify.reference_run import Reference
from tests.figures import training_apart
from tests.parity.cases_worker import main
from tests.parity.engine_groups import from_rank_0
from tests.parity.image_case_worker import trained
from tests.parity.vision_language import (
    ROWS,
    VlmCase,
    recipe,
    reference,
    write_cutting,
    write_pictures,
)

CUTTING = "cutting"


def _write(folder: Path) -> None:
    write_pictures(folder)
    write_cutting(folder / CUTTING)


def measure(case: VlmCase, folder: Path) -> dict[str, float]:
    pictures = folder.parents[1] / "pictures"
    document = recipe(case, pictures / CUTTING if case.tiles else None)
    plan, trainer, results = trained(document, folder, pictures, _write, ROWS)
    wanted = from_rank_0(
        lambda: reference(
            case.model,
            case.tied,
            pictures,
            folder / "tokenizer",
            tuple(case.freeze),
            case.lora,
            case.steps,
        )
    )
    figures = training_apart([r.loss for r in results], [r.grad_norm for r in results], wanted)
    return {**figures, "weights": weights_of_ranks(plan, trainer, wanted)}


def weights_of_ranks(plan: Plan, trainer: Trainer, wanted: Reference) -> float:
    """Collective. How far the parameters that the ranks own are from one process's; infinite where
    one is owned nowhere."""
    splits = {p.name: p for module in plan.tensor_parallel.modules for p in module.parameters}
    at = plan.ranks[dist.get_rank()].tensor
    apart, found = [], set()
    weights = {hf_parameter_name(name): value for name, value in wanted.weights.items()}
    for fragment in trainer.owned_shards():
        if fragment.name not in weights:
            continue  # a buffer
        value, split = weights[fragment.name], splits.get(fragment.name)
        if split is not None and split.dimension is not None:
            value = torch.cat(
                [value.narrow(split.dimension, *piece) for piece in split.shard_ranges(at)],
                split.dimension,
            )
        states = fragment.states
        own = states["fp32"] if "fp32" in states else states["value"]
        apart.append(
            max_abs_diff(
                own.view(-1), value.reshape(-1)[fragment.start : fragment.start + own.numel()]
            )
        )
        found.add(fragment.name)
    everyone: list[set[str]] = [set()] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    return largest_difference(apart) if set().union(*everyone) == weights.keys() else math.inf


if __name__ == "__main__":
    main(measure, VlmCase)

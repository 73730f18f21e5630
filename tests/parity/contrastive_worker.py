"""Under the `deepspeed` launcher: the cases of tests/parity/test_contrastive.py of one world size,
in one launch."""

from __future__ import annotations

import math
from pathlib import Path

from deepspeed import comm as dist

from shardwright.engines.trainer_protocol import Trainer
from shardwright.utils.numeric_difference import largest_difference, max_abs_diff
from shardwright.verify.reference_run import Reference
from tests.figures import training_apart
from tests.parity.cases_worker import main
from tests.parity.contrastive import PairCase, recipe, reference, without_gradient, write_pairs
from tests.parity.engine_groups import from_rank_0
from tests.parity.image_case_worker import trained


def measure(case: PairCase, folder: Path) -> dict[str, float]:
    pictures = folder.parents[1] / "pairs"
    _, trainer, results = trained(recipe(case), folder, pictures, write_pairs)
    wanted = from_rank_0(
        lambda: reference(
            case.model,
            pictures,
            folder / "tokenizer",
            case.steps,
            tuple("vision_model" for _ in case.freeze),
        )
    )
    figures = training_apart([r.loss for r in results], [r.grad_norm for r in results], wanted)
    return {**figures, "weights": weights_of_ranks(trainer, wanted)}


def weights_of_ranks(trainer: Trainer, wanted: Reference) -> float:
    """Collective. How far the parameters that the ranks own are from one process's, keys' biases
    apart; infinite where one is owned nowhere."""
    apart, found = [0.0], set()
    for fragment in trainer.owned_shards():
        if fragment.name not in wanted.weights:
            continue  # a buffer
        found.add(fragment.name)
        if without_gradient(fragment.name):
            continue
        own = fragment.states["fp32"] if "fp32" in fragment.states else fragment.states["value"]
        value = wanted.weights[fragment.name].reshape(-1)[
            fragment.start : fragment.start + own.numel()
        ]
        apart.append(max_abs_diff(own.view(-1), value))
    everyone: list[set[str]] = [set()] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    return (
        largest_difference(apart) if set().union(*everyone) == wanted.weights.keys() else math.inf
    )


if __name__ == "__main__":
    main(measure, PairCase)

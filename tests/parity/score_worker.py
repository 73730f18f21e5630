"""Under the `deepspeed` launcher: the scores of a forward pass on the real engines, many cases of
one world size.

SHARDWRIGHT_CASES_OUT, SHARDWRIGHT_CASES: as of cases_worker.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed import comm as dist

from shardwright.compile.forward_only_recipe import forward_only_recipe
from shardwright.data.dataset import open_dataset
from shardwright.engines.deepspeed.deepspeed_trainers import DeepSpeedTrainer, build_trainer
from shardwright.parallel.micro_batches import ValidationBatches, label_mask
from shardwright.recipe.recipe_types import Recipe
from shardwright.train.training_session import check_parameters
from tests.parity.cases_worker import main
from tests.parity.engine_groups import compile_folder, from_rank_0
from tests.parity.harness import SEED, Case, write_inputs
from tests.parity.models import MODELS
from tests.parity.reference import initial_model

TOP = 5
EXAMPLES = 7
"""No multiple of any layout's micro-batches."""


class _FirstExamples:
    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return EXAMPLES

    def read(self, indices: np.ndarray) -> Any:
        return self._rows.read(indices)


def plain_scores(case: Case, tokens: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probabilities (EXAMPLES, S - 1, V), normalizers (EXAMPLES, S - 1, 1)) of one process."""
    model = initial_model(MODELS[case.model], SEED).eval()
    ids = torch.from_numpy(tokens[:EXAMPLES].astype(np.int64))
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    normalizers = logits.logsumexp(-1, keepdim=True)
    return logits - normalizers, normalizers


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float(((found - wanted) / wanted).abs().max())


def measure(case: Case, folder: Path) -> dict[str, float]:
    if dist.get_rank() == 0:
        write_inputs(case, folder)

    def derived(recipe: Recipe) -> Recipe:
        pinned = recipe.document["parallelism"]
        assert isinstance(pinned, dict)
        return forward_only_recipe(recipe, pinned=pinned)

    plan = compile_folder(folder, derived)
    assert plan.strategy.world_size == case.world
    trainer = build_trainer(plan, folder, forward_only=True)
    assert isinstance(trainer, DeepSpeedTrainer)
    held = trainer.parameter_shards()
    check_parameters(plan, dist.get_rank(), held, trainer.transposed)
    assert not any(shard.is_trained for shard in held.values())
    rows = _FirstExamples(open_dataset(plan, folder).train)
    batches = ValidationBatches(plan, rows, plan.ranks[dist.get_rank()].data)
    values = trainer.token_scores(batches, TOP)
    labels = torch.from_numpy(label_mask(plan, rows.read(np.arange(EXAMPLES))))
    assert labels[:, 1:].all() and not labels[:, 0].any()
    wanted, normalizers = from_rank_0(lambda: plain_scores(case, np.load(folder / "tokens.npy")))
    own = torch.from_numpy(np.load(folder / "tokens.npy")[:EXAMPLES, 1:].astype(np.int64))
    found = values[:, 1:]
    ids = found[..., 2 : 2 + TOP].long()
    assert (ids.sort(-1).values.diff(dim=-1) > 0).all(), "an id twice"
    largest = found[..., 2 + TOP :]
    return {
        "label": relative(found[..., :1], wanted.gather(-1, own[..., None])),
        "normalizer": relative(found[..., 1:2], normalizers),
        "largest": relative(largest, wanted.topk(TOP, dim=-1).values),
        # Where two are as likely, either may come first.
        "of ids": relative(largest, wanted.gather(-1, ids)),
        "without top": float((trainer.token_scores(batches) - values[..., 0]).abs().max()),
    }


if __name__ == "__main__":
    main(measure, Case)

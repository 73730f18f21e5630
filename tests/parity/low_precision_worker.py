"""cases_worker.py, with each step from the plain process's weights and moments.

A weight whose last bit differs may be rounded to FP8's next number, and one such weight moves the
loss of a tiny model by 1e-4. So the weights are compared after every step, and then set equal.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from deepspeed import comm as dist

from shardwright.engines.deepspeed.deepspeed_optimizer_shards import copy_masters_to_model
from shardwright.engines.deepspeed.deepspeed_trainers import build_trainer
from shardwright.engines.reference.reference_optimizer import ReferenceOptimizer
from shardwright.engines.trainer_protocol import Trainer
from shardwright.parallel.weight_files import SliceRange
from shardwright.parallel.weight_loader import ShardReader
from shardwright.train.training_session import check_parameters
from shardwright.utils.numeric_difference import difference
from tests.parity.cases_worker import compiled, main, train
from tests.parity.engine_groups import from_rank_0
from tests.parity.harness import STEPS, Case, reference
from tests.parity.reference import Reference


class Values:
    """Weights in memory, by Hugging Face's names."""

    def __init__(self, values: dict[str, torch.Tensor]) -> None:
        self.values = values

    def names(self) -> Iterable[str]:
        return self.values

    def read(self, name: str, range_: SliceRange | None) -> torch.Tensor:
        return self.values[name] if range_ is None else self.values[name].narrow(*range_)

    def may_round(self, name: str, dtype: torch.dtype) -> bool:
        return False


def measure(case: Case, folder: Path) -> dict[str, float]:
    plan = compiled(case, folder)
    trainer = build_trainer(plan, folder)
    held = trainer.parameter_shards()
    check_parameters(plan, dist.get_rank(), held, trainer.transposed)
    assert any(p.in_low_precision for p in held.values())
    wanted, after = from_rank_0(lambda: stepwise(case, folder))
    figures: dict[str, list[float]] = {"loss": [], "norm": [], "weight": []}
    for step, values in enumerate(after, 1):
        (result,) = train(plan, folder, trainer, step, step)
        figures["loss"].append(difference(result.loss, wanted.losses[step - 1]))
        figures["norm"].append(
            difference(result.grad_norm, wanted.grad_norms[step - 1], relative=True)
        )
        shards = {
            state: ShardReader(plan, Values(tensors), trainer.transposed)
            for state, tensors in values.items()
        }
        figures["weight"].append(set_states(trainer, shards))
    # A number that lies on FP8's rounding boundary in some step moves that step alone.
    return {f"{key} {name}": pick(steps) for key, steps in figures.items() for name, pick in PICKS}


PICKS = (("of most steps", lambda steps: sorted(steps)[-3]), ("of any step", max))
"""The third largest of eight steps, and the largest."""


States = dict[str, dict[str, torch.Tensor]]


def stepwise(case: Case, folder: Path) -> tuple[Reference, list[States]]:
    """The plain run, and its weights and moments after each step."""
    after: list[States] = []
    plain = ReferenceOptimizer.step

    def step(self: ReferenceOptimizer, rate: float) -> float:
        norm = plain(self, rate)
        every = {name: self.states(p) for name, p in self.live.items()}
        after.append(
            {
                state: {name: states[state].detach().clone() for name, states in every.items()}
                for state in ("fp32", "exp_avg", "exp_avg_sq")
            }
        )
        return norm

    ReferenceOptimizer.step = step  # type: ignore[method-assign]
    try:
        wanted = reference(case, np.load(folder / "tokens.npy"))
    finally:
        ReferenceOptimizer.step = plain  # type: ignore[method-assign]
    assert len(after) == STEPS
    return wanted, after


@torch.no_grad()
def set_states(trainer: Trainer, wanted: dict[str, ShardReader]) -> float:
    """Collective. The largest difference of a weight, before it is set."""
    worst = 0.0
    for shard in trainer.owned_shards():
        for state, held in shard.states.items():
            if state not in wanted or not held.numel():
                continue
            whole = wanted[state].read(shard.name)
            values = whole.reshape(-1).narrow(0, shard.start, held.numel())
            if state == "fp32":
                worst = max(worst, float((held - values).abs().max()))
            held.copy_(values)
    copy_masters_to_model(trainer.engine)
    return worst


if __name__ == "__main__":
    main(measure)

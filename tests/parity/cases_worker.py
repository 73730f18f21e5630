"""Under the `deepspeed` launcher: many parity cases of one world size in one launch, on the real
engines.

SHARDWRIGHT_CASES_OUT names the folder for results, SHARDWRIGHT_CASES is JSON: name -> the case's
fields.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
import transformers
from deepspeed import comm as dist
from deepspeed import ops

from shardwright.checkpoint.checkpoint_saver import check_master_weights
from shardwright.data.dataset import open_dataset
from shardwright.engines.deepspeed.deepspeed_trainers import build_trainer
from shardwright.engines.trainer_protocol import StepResult, Trainer
from shardwright.parallel.distributed_losses import CausalLoss
from shardwright.parallel.learning_rate import learning_rate
from shardwright.parallel.micro_batches import TrainingBatches
from shardwright.plan.plan import Plan
from shardwright.train.training_session import check_parameters
from shardwright.train.training_worker import leave
from tests.figures import training_apart
from tests.parity.engine_groups import compile_folder, from_rank_0, share_groups
from tests.parity.harness import STEPS, Case, reference, write_inputs

PLAIN_LOSSES = CausalLoss.losses


def measure(case: Case, folder: Path) -> dict[str, float]:
    plan = compiled(case, folder)
    trainer = build_trainer(plan, folder)
    check_parameters(plan, dist.get_rank(), trainer.parameter_shards(), trainer.transposed)
    widest = _watch_logits()
    results = train(plan, folder, trainer, 1, STEPS)
    check_master_weights(trainer.owned_shards())
    everyone: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, results)
    assert all(other == results for other in everyone), (
        everyone
    )  # what a rank decides by its loss, all decide
    return {**difference(case, folder, results), "positions": max(widest, default=0)}


def compiled(case: Case, folder: Path, **sections: object) -> Plan:
    """Collective. sections: of the recipe, beside the case's."""
    if dist.get_rank() == 0:
        write_inputs(case, folder)
        document = json.loads((folder / "recipe.yaml").read_text())
        (folder / "recipe.yaml").write_text(json.dumps(document | sections))
    return compile_folder(folder)


def train(plan: Plan, folder: Path, trainer: Trainer, first: int, last: int) -> list[StepResult]:
    batches = TrainingBatches(plan, open_dataset(plan, folder))
    results = []
    for step in range(first, last + 1):
        rate = learning_rate(plan.optimizer, plan.scheduler, STEPS, step)
        results.append(
            trainer.step(batches.micro_batches(step, plan.ranks[dist.get_rank()].data), rate)
        )
    return results


def difference(case: Case, folder: Path, results: list[StepResult]) -> dict[str, float]:
    """From one plain process of the case's precision."""
    dtype = torch.float32 if case.precision == "fp32" else torch.bfloat16
    wanted = from_rank_0(lambda: reference(case, np.load(folder / "tokens.npy"), dtype))
    return training_apart([r.loss for r in results], [r.grad_norm for r in results], wanted)


def _watch_logits() -> list[int]:
    """Positions of each chunk whose logits are made on this rank from now on."""
    seen: list[int] = []

    def losses(
        self: CausalLoss, logits: torch.Tensor, target: torch.Tensor, *teacher: torch.Tensor
    ) -> torch.Tensor:
        seen.append(logits.shape[1])
        return PLAIN_LOSSES(self, logits, target, *teacher)

    CausalLoss.losses = losses  # type: ignore[method-assign]
    return seen


def begin() -> None:
    """Collective: the process groups, for many engines in one process."""
    ops.__compatible_ops__["deepspeed_shm_comm"] = False
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    share_groups()


def main(measure: Callable[[Any, Path], dict[str, float]] = measure, kind: type = Case) -> None:
    begin()
    out, rank = Path(os.environ["SHARDWRIGHT_CASES_OUT"]), dist.get_rank()
    for name, fields in json.loads(os.environ["SHARDWRIGHT_CASES"]).items():
        try:
            line: dict[str, object] = {"case": name, **measure(kind(**fields), out / "work" / name)}
        except Exception:
            line = {"case": name, "error": traceback.format_exc()}
        with (out / f"rank-{rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        if "error" in line:
            sys.stdout.flush()
            os._exit(1)  # the other ranks may be inside a collective
    dist.barrier()
    dist.destroy_process_group()
    leave(0)


if __name__ == "__main__":
    main()

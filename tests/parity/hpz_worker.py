"""Under `deepspeed --num_gpus 4`: hpZ's second copy of the weights over two nodes of two ranks, as
the plan has them.

SHARDWRIGHT_CASES_OUT: folder for figures-RANK.json. SHARDWRIGHT_CASES is JSON: name -> the case's
fields.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Container, Iterable
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from deepspeed import comm as dist
from deepspeed.runtime.zero import partition_parameters
from deepspeed.utils import groups

from shardwright.checkpoint.checkpoint_loader import load_checkpoint
from shardwright.checkpoint.checkpoint_saver import save_checkpoint
from shardwright.data.dataset import open_dataset
from shardwright.engines.deepspeed import deepspeed_optimizer_shards, deepspeed_trainers
from shardwright.engines.deepspeed.deepspeed_groups import hpz_group
from shardwright.engines.deepspeed.deepspeed_trainers import build_trainer
from shardwright.engines.deepspeed.ds_config import ds_config
from shardwright.engines.trainer_protocol import OwnedShard, Trainer
from shardwright.layout.zero_settings import HPZ
from shardwright.parallel.micro_batches import ValidationBatches
from shardwright.plan.plan import Plan
from shardwright.train.training_worker import leave
from shardwright.utils.numeric_difference import largest_difference, max_abs_diff, max_series_diff
from tests.parity.cases_worker import begin, compiled, difference, train
from tests.parity.engine_groups import from_rank_0
from tests.parity.harness import STEPS, Case, reference
from tests.parity.models import LLAMA, MODELS

SAVED, LAST = 2, 4
GATHERED: Counter[int] = Counter()
"""Size of the group -> elements of weights gathered over it."""
PLAIN_GATHER = partition_parameters._dist_allgather_fn


def _gather(shard: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup) -> object:
    GATHERED[dist.get_world_size(group)] += whole.numel()
    return PLAIN_GATHER(shard, whole, group)


def measure(case: Case, folder: Path) -> dict[str, float]:
    """far, near: elements that the last step gathers over all ranks and inside a node, a parameter
    of the model."""
    plan = compiled(case, folder)
    trainer = build_trainer(plan, folder)
    results = train(plan, folder, trainer, 1, STEPS - 1)
    GATHERED.clear()
    results += train(plan, folder, trainer, STEPS, STEPS)
    numel = sum(p.ds_numel for p in trainer.engine.module.parameters())
    return {
        **difference(case, folder, results),
        "weight": _weight_difference(case, plan, folder, trainer),
        "hpz": plan.strategy.hpz_partition_size,
        "far": GATHERED[plan.strategy.data] / numel,
        "near": GATHERED[plan.strategy.hpz_partition_size] / numel,
    }


def _weight_difference(case: Case, plan: Plan, folder: Path, trainer: Trainer) -> float:
    """Largest, of what this rank's optimizer holds after the last step. 0 where one process does
    not hold the same: shards, adapters, other precisions."""
    if case.tensor > 1 or case.lora_rank or case.precision != "fp32":
        return 0.0
    wanted = from_rank_0(lambda: reference(case, np.load(folder / "tokens.npy")).weights)
    fragments = trainer.owned_shards()
    return fragments_apart(fragments, trainer.transposed, wanted)


def fragments_apart(
    fragments: Iterable[OwnedShard], transposed: Container[str], wanted: dict[str, torch.Tensor]
) -> float:
    off = []
    for f in fragments:
        whole = wanted[f.name].t() if f.name in transposed else wanted[f.name]
        mine = f.states["fp32"]
        off.append(max_abs_diff(mine, whole.reshape(-1)[f.start : f.start + mine.numel()]))
    return largest_difference(off)


def under_tensor_parallelism(folder: Path) -> list[float]:
    """How far gradient norms are off those without hpZ where the group is ours, and where it is the
    one that DeepSpeed makes: 2 tensor x 2 data ranks, so that its consecutive ranks are those of
    one tensor group."""
    MODELS["llama-even"] = {
        **LLAMA,
        "vocab_size": 256,
    }  # an uneven cut is an abort there, an even one is silent
    case = Case(model="llama-even", tensor=2, data=2, zero_stage=3)
    plan = compiled(case, folder)
    wanted = [r.grad_norm for r in train(plan, folder, build_trainer(plan, folder), 1, 2)]
    strategy = dataclasses.replace(plan.strategy, hpz_partition_size=2)
    plan = dataclasses.replace(plan, strategy=strategy, zero={**plan.zero, HPZ: 2})
    if dist.get_rank() == 0:
        (folder / "ds_config.json").write_text(json.dumps(ds_config(plan)))
    dist.barrier()
    off = []
    for group in (hpz_group, _deepspeeds_group):
        with patch.object(deepspeed_trainers, "hpz_group", group):
            trainer = build_trainer(plan, folder)
            norms = [r.grad_norm for r in train(plan, folder, trainer, 1, len(wanted))]
        off.append(max_series_diff(norms, wanted, relative=True))
    return off


def _deepspeeds_group(plan: Plan) -> dist.ProcessGroup:
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    groups._create_zero_param_parallel_group(plan.strategy.hpz_partition_size)
    return groups._get_zero_param_intra_parallel_group()


def resumed(folder: Path) -> dict[str, list[float]]:
    """A held-out loss at the checkpoint and the losses of the steps after it: uninterrupted,
    resumed, and resumed with the second copies left as they were. Adapters: frozen weights beside
    trained ones."""
    case = Case(model="gpt2", data=4, zero_stage=3, nodes=2, lora_rank=4, precision="bf16")
    plan = compiled(case, folder)
    first = build_trainer(plan, folder)
    train(plan, folder, first, 1, SAVED)
    save_checkpoint(plan, folder, first, SAVED)
    step = folder / plan.checkpoint.directory / f"step-{SAVED:08d}"
    rows = open_dataset(plan, folder).train

    def losses(trainer: Trainer) -> list[float]:
        held_out, _ = trainer.evaluate(
            ValidationBatches(plan, rows, plan.ranks[dist.get_rank()].data)
        )
        return [held_out, *(r.loss for r in train(plan, folder, trainer, SAVED + 1, LAST))]

    found = {"uninterrupted": losses(first)}
    again = build_trainer(plan, folder, resumes=True)
    load_checkpoint(plan, again, step)
    found["resumed"] = losses(again)
    with patch.object(deepspeed_optimizer_shards, "drop_hpz_copies", lambda module: None):
        stale = build_trainer(plan, folder, resumes=True)
        load_checkpoint(plan, stale, step)
    found["stale"] = losses(stale)
    return found


def main() -> None:
    begin()
    partition_parameters._dist_allgather_fn = _gather
    out = Path(os.environ["SHARDWRIGHT_CASES_OUT"])
    cases = json.loads(os.environ["SHARDWRIGHT_CASES"])
    figures: dict[str, object] = {
        name: measure(Case(**fields), out / name) for name, fields in cases.items()
    }
    if dist.get_world_size() == 4:
        figures["tensor"] = under_tensor_parallelism(out / "tensor")
        figures["resumed"] = resumed(out / "resumed")
    (out / f"figures-{dist.get_rank()}.json").write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()
    leave(0)


if __name__ == "__main__":
    main()

"""A checkpoint read into a trainer, whatever layout wrote it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import distributed as dist

from shardwright.checkpoint.checkpoint_compatibility import same_sharding
from shardwright.checkpoint.checkpoint_manifest import damage
from shardwright.checkpoint.checkpoint_reader import ALL_EXPERTS, CheckpointReader
from shardwright.checkpoint.checkpoint_store import CheckpointStore
from shardwright.checkpoint.random_state import set_random_state
from shardwright.engines.trainer_protocol import OptimizerCounters, OwnedShard, Trainer
from shardwright.layout.parameter_sharding import ParameterSharding
from shardwright.plan.plan import Plan
from shardwright.plan.plan_json import read_plan


def parameter_splits(plan: Plan) -> dict[str, ParameterSharding]:
    return {p.name: p for module in plan.tensor_parallel.modules for p in module.parameters}


def replicated_split(name: str, shape: tuple[int, ...], trainer: Trainer) -> ParameterSharding:
    """Of a parameter that every tensor rank has whole. shape: as this process holds it."""
    shape = shape[::-1] if name in trainer.transposed else shape
    return ParameterSharding(name=name, shape=shape, dimension=None, blocks=(), sizes=())


def read_states(plan: Plan, trainer: Trainer, checkpoint: Path, names: tuple[str, ...]) -> set[str]:
    """Those of the states that the checkpoint has are read into the trainer's. Returns which they
    are. Raises Refusal: SW6201."""
    present: set[str] = set()
    splits = parameter_splits(plan)
    with CheckpointReader(checkpoint) as reader, torch.no_grad():
        for f in trainer.owned():
            saved = reader.saved(f.name).states
            wanted = tuple(name for name in names if name in f.states and name in saved)
            _read_fragment(plan, trainer, reader, f, wanted, splits)
            present.update(wanted)
    return present


def _read_fragment(
    plan: Plan,
    trainer: Trainer,
    reader: CheckpointReader,
    f: OwnedShard,
    states: tuple[str, ...],
    splits: dict[str, ParameterSharding],
) -> None:
    at = plan.ranks[dist.get_rank()]
    split = splits.get(f.name) or replicated_split(f.name, f.shard_shape, trainer)
    part = (
        (plan.expert_rank_of(at), plan.strategy.expert)
        if plan.expert_shard_count(f.name) > 1
        else ALL_EXPERTS
    )
    for state in states:
        values = f.states[state]
        values.copy_(
            reader.fragment(f.name, state, split, at.tensor, f.start, values.numel(), part)
        )


def load_checkpoint(plan: Plan, trainer: Trainer, checkpoint: Path) -> int:
    """Collective. Of any layout. Returns the step that the checkpoint closed. Raises Refusal:
    SW6201."""
    _fetch_missing(plan, checkpoint)
    rank, splits = dist.get_rank(), parameter_splits(plan)
    with CheckpointReader(checkpoint) as reader, torch.no_grad():
        for f in trainer.owned():
            _read_fragment(plan, trainer, reader, f, tuple(f.states), splits)
        manifest = reader.manifest
    trainer.finish_restore(
        manifest.step,
        OptimizerCounters(updates=manifest.optimizer_step, loss_scale=manifest.loss_scale),
    )
    if same_sharding(plan, read_plan(checkpoint)):
        path = checkpoint / f"random-{rank:05d}.json"
        try:
            set_random_state(json.loads(path.read_text(encoding="utf-8")))
        except (
            OSError,
            ValueError,
            LookupError,
            TypeError,
            RuntimeError,
        ) as error:  # a stranger may have written it
            raise reader.incomplete_checkpoint(
                f"{path.name} holds no random state ({error})"
            ) from None
    else:
        # The ranks of another layout hold other parts: new streams, none of which was drawn from
        # before.
        torch.manual_seed(torch.initial_seed() + (manifest.step + 1) * plan.strategy.world_size)
    return manifest.step


def _fetch_missing(plan: Plan, checkpoint: Path) -> None:
    """Collective. Without a shared file system a host has its own ranks' files alone: one rank of
    it gets the others from checkpoint.upload_to."""
    if (
        plan.checkpoint.upload_to
        and plan.ranks[dist.get_rank()].slot == 0
        and damage(checkpoint, contents=False)
    ):
        CheckpointStore(plan.checkpoint.upload_to).fetch(checkpoint.name, checkpoint.parent)
    dist.barrier()

"""What an island sends of itself from one rank: its own ranges of the fp32 masters, one behind the
other.

Where data ranks have the same masters (ZeRO-0), each takes an equal part of them, and the parts are
gathered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import distributed as dist

from shardwright.checkpoint.checkpoint_loader import read_states
from shardwright.checkpoint.checkpoint_manifest import read_manifest
from shardwright.engines.trainer_protocol import OwnedShard, Trainer
from shardwright.plan.plan import Plan

MASTER = "fp32"


class MasterShard:
    """1-D tensors, fp32, on the host. own: what this rank sends. whole: its own ranges and all of
    the shared ones."""

    def __init__(self, plan: Plan, trainer: Trainer, rank: int) -> None:
        """Collective."""
        self._plan, self._trainer, self._rank = plan, trainer, rank
        self._replica_group = _replica_group(plan, rank)

    def own(self, state: str, out: torch.Tensor | None = None) -> torch.Tensor:
        """A copy; in `out`, where given, which becomes as large."""
        if self._replica_group is None:
            return self._gathered(state, out)
        return self._owned_part(self._gathered(state), out)

    def write(self, state: str, own: torch.Tensor) -> None:
        """Collective. The way back from `own`."""
        whole, at = self._gather_replicated(own), 0
        alone, shared = self._fragments()
        for f in (*alone, *shared):
            values = f.states[state]
            values.copy_(whole[at : at + values.numel()])
            at += values.numel()

    def state_names(self) -> list[str]:
        """The same on every rank and island: the master first."""
        alone, shared = self._fragments()
        return list(
            dict.fromkeys((MASTER, *(name for f in (*alone, *shared) for name in f.states)))
        )

    # In a checkpoint, beside the trainer's own states.

    def trainer_with_states(self, states: dict[str, torch.Tensor]) -> Trainer:
        """Collective. The trainer with these states, of which each is this rank's own."""
        return _with_states(
            self._trainer,
            {name: self._gather_replicated(own).clone() for name, own in states.items()},
        )

    def load(self, names: tuple[str, ...], checkpoint: Path) -> dict[str, torch.Tensor]:
        """Those of the states that the checkpoint has; of each, this rank's own."""
        held = {
            state
            for tensor in read_manifest(checkpoint).tensors.values()
            for state in tensor.states
        }
        wholes = {name: torch.zeros_like(self._gathered(MASTER)) for name in names if name in held}
        read_states(self._plan, _with_states(self._trainer, wholes), checkpoint, tuple(wholes))
        return {name: self._owned_part(whole) for name, whole in wholes.items()}

    def _fragments(self) -> tuple[list[OwnedShard], list[OwnedShard]]:
        """(those that this data rank alone has, those that others have too)."""
        trained = [f for f in self._trainer.owned() if MASTER in f.states]
        return [f for f in trained if f.partitioned], [f for f in trained if not f.partitioned]

    def _gathered(self, state: str, out: torch.Tensor | None = None) -> torch.Tensor:
        own, shared = self._fragments()
        parts = [f.states[state].detach().float().cpu() for f in (*own, *shared)]
        return torch.cat(parts, out=out) if parts else torch.zeros(0)

    def _bounds(self) -> tuple[int, int, int]:
        """(elements that this data rank alone has, shared ones, of which each rank takes this many,
        the last fewer)."""
        own, shared = self._fragments()
        counts = [sum(f.states[MASTER].numel() for f in each) for each in (own, shared)]
        return counts[0], counts[1], -(-counts[1] // self._plan.strategy.shards)

    def _owned_part(self, whole: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if self._replica_group is None:
            return whole
        alone, shared, each = self._bounds()
        first = min(shared, each * self._replica_index())
        return torch.cat(
            [whole[:alone], whole[alone + first : alone + min(shared, first + each)]], out=out
        )

    def _replica_index(self) -> int:
        at = self._plan.ranks[self._rank]
        return at.data * self._plan.strategy.context + at.context

    def _gather_replicated(self, own: torch.Tensor) -> torch.Tensor:
        """Collective. `own` itself, not a copy, where that is all."""
        alone, shared, each = self._bounds()
        if self._replica_group is None or shared == 0:
            return own
        mine = torch.zeros(each)
        mine[: own.numel() - alone] = own[alone:]
        found = [torch.zeros(each) for _ in range(self._plan.strategy.shards)]
        dist.all_gather(found, mine, group=self._replica_group)
        return torch.cat([own[:alone], torch.cat(found)[:shared]])


class _TrainerWithExtraStates:
    """A trainer whose trained fragments have more states. wholes: state -> the values, in the order
    of `_gathered`."""

    def __init__(self, trainer: Trainer, wholes: dict[str, torch.Tensor]) -> None:
        self._trainer, self._rank_states = trainer, wholes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    def owned(self) -> Iterator[OwnedShard]:
        fragments = list(self._trainer.owned())
        trained = [f for f in fragments if MASTER in f.states]
        at = {True: 0, False: sum(f.states[MASTER].numel() for f in trained if f.partitioned)}
        for f in fragments:
            if MASTER not in f.states:
                yield f
                continue
            start, count = at[f.partitioned], f.states[MASTER].numel()
            at[f.partitioned] += count
            more = {
                name: values[start : start + count] for name, values in self._rank_states.items()
            }
            yield replace(f, states={**f.states, **more})


def _with_states(trainer: Trainer, wholes: dict[str, torch.Tensor]) -> Trainer:
    return cast(Trainer, _TrainerWithExtraStates(trainer, wholes))


def _replica_group(plan: Plan, rank: int) -> Any:
    """Collective: each rank makes all of the groups. The data ranks that have the same masters as
    this one; None where each has its own."""
    if plan.strategy.zero_stage > 0 or plan.strategy.shards == 1:
        return None
    members: dict[tuple[int, int], list[int]] = {}
    for r in plan.ranks:
        members.setdefault((r.pipeline, r.tensor), []).append(r.rank)
    groups = [(ranks, dist.new_group(ranks, backend="gloo")) for ranks in members.values()]
    return next(group for ranks, group in groups if rank in ranks)

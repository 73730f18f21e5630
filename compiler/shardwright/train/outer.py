"""The outer step between islands, on one rank (decision 033).

Works on what a checkpoint is made of: this rank's own ranges of the fp32 masters. The delta is the anchor (those ranges
after the last outer step) less what they are now; the store returns the islands' mean, in the same place, and each rank
applies it to its own.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from shardwright.diagnostics import refusal
from shardwright.engines.protocol import Counters, Trainer
from shardwright.islands.client import Answer, Link
from shardwright.islands.wire import Broken, FrameKind
from shardwright.plan.plan import Plan
from shardwright.train.ranges import MASTER, Ranges
from shardwright.train.store_links import StoreLinks, Unreached

ANCHOR, MOMENTUM = "outer_anchor", "outer_momentum"
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterResult:
    """What came of an outer step. step: that the weights are at now. members: () where another island's state was
    taken. sent_bytes: by this island, without copies."""

    step: int
    members: tuple[int, ...]
    seconds: float
    sent_bytes: int


class Outer:
    """base: the step of the last outer step that the weights have."""

    def __init__(self, plan: Plan, folder: Path, trainer: Trainer, rank: int, data_digest: str) -> None:
        """Collective. Raises Refusal: SW6313 where this host has no secret."""
        assert plan.outer is not None and plan.outer.island is not None, "asked for before"
        self.plan, self.outer = plan, plan.outer
        self._trainer = trainer
        self._store = StoreLinks(plan, folder, rank, data_digest)
        self._ranges = Ranges(plan, trainer, rank)
        self.base = 0
        self._anchor = self._ranges.own(MASTER)
        self._momentum = torch.zeros_like(self._anchor) if plan.outer.optimizer == "nesterov" else None

    def begin(self, done: int, checkpoint: Path | None) -> int:
        """Collective. Meets the other islands before the first step. done: the step that `checkpoint` closed. Returns
        the step to go on from, which is another island's where this one is behind.

        Raises Refusal: SW6314 where the store is not reached, and for what the store refuses.
        """
        self._anchor = self._ranges.own(MASTER)
        has_anchor = checkpoint is not None and self._load(checkpoint)
        every = self.outer.every_steps
        self.base = (done - 1) // every * every if has_anchor else done
        pending = has_anchor and self.outer.is_due(done, self.plan.training.steps)
        try:
            return self.meet(done, is_due=pending).step
        except Unreached as error:
            raise refusal(
                "SW6314",
                f"the outer store was not reached for {self.outer.deadline_seconds:g} s: {error}",
                "Start `shardwright outer-store DIR` where launch.outer_store says, and see that this host reaches it. "
                "Nothing was trained.",
            ) from None

    def meet(self, step: int, *, is_due: bool = True) -> OuterResult:
        """Collective. The outer step after `step`; without is_due only says that the island is there. Raises Unreached
        on every rank, and Refusal."""
        began = time.monotonic()
        deltas = self._deltas() if is_due else torch.zeros(0)
        done = self._store.agreed(lambda link: self._try(link, step, is_due, deltas))
        answer = done.answer
        if answer.kind == FrameKind.RECEIVE:
            self._use_state(answer.step, done.updates, done.taken)
        elif answer.kind == FrameKind.EXCHANGE:
            self._apply(done.means.float(), step)
            if done.receivers:
                self._give_state()
        else:
            return OuterResult(step=step, members=(), seconds=0.0, sent_bytes=0)
        seconds = time.monotonic() - began
        return OuterResult(step=self.base, members=answer.members, seconds=seconds, sent_bytes=_bytes(deltas).nbytes)

    def leave(self, *, done: bool) -> None:
        """After every rank's last word. done: trained to the last step."""
        self._store.leave(done=done)

    # What a checkpoint holds beside the trainer's own.

    def saved(self, step: int) -> Trainer:
        """Collective. The trainer with the outer momentum, and with the anchor in the middle of a round."""
        states = {} if self._momentum is None else {MOMENTUM: self._momentum}
        if self.base != step:
            states[ANCHOR] = self._anchor
        return self._ranges.saved(states)

    def _load(self, checkpoint: Path) -> bool:
        """Whether it was saved in the middle of a round."""
        states = {ANCHOR: self._anchor}
        if self._momentum is not None:
            states[MOMENTUM] = self._momentum
        return ANCHOR in self._ranges.load(states, checkpoint)

    def _deltas(self) -> torch.Tensor:
        """Of this rank, as they are sent. Raises Refusal on every rank where one is no finite number: SW6317."""
        deltas = (self._anchor - self._ranges.own(MASTER)).to(_DTYPES[self.outer.precision])
        flags: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(flags, bool(deltas.isfinite().all()))
        if not all(flags):
            raise refusal(
                "SW6317",
                f"island {self.outer.island} has weights that are no finite numbers (rank {flags.index(False)}): they "
                "stay out of the other islands",
                "The others go on without it. `shardwright run` goes on from its newest checkpoint with a finite loss, "
                "and takes their state at the next outer step.",
            )
        return deltas

    def _apply(self, mean: torch.Tensor, step: int) -> None:
        """Collective. SGD with Nesterov momentum as torch.optim.SGD has it, or the average."""
        if self._momentum is None or self.outer.lr is None or self.outer.momentum is None:
            self._anchor -= mean
        else:
            self._momentum.mul_(self.outer.momentum).add_(mean)
            self._anchor.sub_(mean + self.outer.momentum * self._momentum, alpha=self.outer.lr)
        self._ranges.write(MASTER, self._anchor)
        self._trainer.restored(step, self._trainer.counters())
        self.base = step

    # Another island's state.

    def _state_names(self) -> list[str]:
        """The same on every rank and island: the master first."""
        return [*self._ranges.state_names(), *([] if self._momentum is None else [MOMENTUM])]

    def _give_state(self) -> None:
        """To islands that are behind. A connection that breaks here is found broken at the next outer step."""
        own = {MASTER: self._anchor} | ({} if self._momentum is None else {MOMENTUM: self._momentum})
        parts = (own[n] if n in own else self._ranges.own(n) for n in self._state_names())
        with contextlib.suppress(Broken):
            self._store.link.give_state((_bytes(part) for part in parts), self._trainer.counters().updates)

    def _use_state(self, step: int, updates: int, taken: dict[str, torch.Tensor]) -> None:
        """Collective."""
        self._anchor, self._momentum = taken[MASTER], taken.pop(MOMENTUM, None)
        for state, own in taken.items():
            self._ranges.write(state, own)
        self._trainer.restored(step, Counters(updates=updates, loss_scale=None))
        self.base = step

    # The store.

    def _try(self, link: Link, step: int, is_due: bool, deltas: torch.Tensor) -> _Outcome:
        """This rank's part. Raises Broken."""
        found = _Outcome(means=torch.empty_like(deltas))
        check, size = int(self._anchor.view(torch.int32).sum(dtype=torch.int64)), _bytes(deltas).nbytes
        while True:
            found.answer = link.arrive(base=self.base, step=step, is_due=is_due, size=size, check=check)
            if found.answer.kind == FrameKind.GO:
                return found
            if found.answer.kind == FrameKind.RECEIVE:
                found.taken = {name: torch.empty_like(self._anchor) for name in self._state_names()}
                found.updates = link.take_state(_bytes(part) for part in found.taken.values())
                return found
            receivers = link.exchange(found.answer.attempt, _bytes(deltas), _bytes(found.means))
            if receivers is not None:
                found.receivers = receivers
                return found


@dataclass(slots=True, kw_only=True)
class _Outcome:
    """What a rank's part of an outer step gave it. taken: of an island whose state it takes."""

    means: torch.Tensor
    answer: Answer = field(default_factory=lambda: Answer(kind=FrameKind.GO))
    receivers: list[int] = field(default_factory=list)
    taken: dict[str, torch.Tensor] = field(default_factory=dict)
    updates: int = 0


def _bytes(values: torch.Tensor) -> memoryview:
    """The tensor's own memory."""
    flat = values.view(torch.int16) if values.dtype == torch.bfloat16 else values
    return flat.numpy().data.cast("B") if flat.numel() else memoryview(b"")

"""The outer step between islands, on one rank (decision 033).

Works on what a checkpoint is made of: this rank's own ranges of the fp32 masters. The delta is the
anchor (those ranges after the last outer step) less what they are now; the store returns the
islands' mean, in the same place, and each rank applies it to its own anchor. The weights are then
the anchor; with overlap (arXiv 2501.18512) the round is on its way while the next steps train, and
the anchor is mixed into what they made of the weights.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import distributed as dist

from shardwright.checkpoint.checkpoint_loader import read_states
from shardwright.checkpoint.checkpoint_manifest import OUTER_ANCHOR, read_manifest
from shardwright.diagnostics import refusal
from shardwright.diloco.outer_store_channel import FrameKind
from shardwright.diloco.outer_store_client import (
    Link,
    OuterStoreConnections,
    OuterStoreUnreachable,
    RoundReply,
)
from shardwright.engines.trainer_protocol import OptimizerCounters, OwnedShard, Trainer
from shardwright.monitor.run_files import OUTER_STEPS_FILE
from shardwright.plan.plan import Plan, read_plan
from shardwright.utils.authenticated_socket import ChannelError
from shardwright.utils.json_lines import JsonLinesWriter

# What an island sends of itself from one rank: its own ranges of the fp32 masters, one behind the
# other.
#
# Where data ranks have the same masters (ZeRO-0), each takes an equal part of them, and the parts
# are
# gathered.


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
        """Return those of the states that the checkpoint has, this rank's own shard of each."""
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
        trained = [f for f in self._trainer.owned_shards() if MASTER in f.states]
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
        return counts[0], counts[1], -(-counts[1] // self._plan.strategy.zero_world_size)

    def _owned_part(self, whole: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if self._replica_group is None:
            return whole
        alone, shared, each = self._bounds()
        at = self._plan.ranks[self._rank]
        first = min(shared, each * (at.data * self._plan.strategy.context + at.context))
        return torch.cat(
            [whole[:alone], whole[alone + first : alone + min(shared, first + each)]], out=out
        )

    def _gather_replicated(self, own: torch.Tensor) -> torch.Tensor:
        """Collective. `own` itself, not a copy, where that is all."""
        alone, shared, each = self._bounds()
        if self._replica_group is None or shared == 0:
            return own
        mine = torch.zeros(each)
        mine[: own.numel() - alone] = own[alone:]
        found = [torch.zeros(each) for _ in range(self._plan.strategy.zero_world_size)]
        dist.all_gather(found, mine, group=self._replica_group)
        return torch.cat([own[:alone], torch.cat(found)[:shared]])


class _TrainerWithExtraStates:
    """A trainer whose trained fragments have more states. wholes: state -> the values, in the order
    of `_gathered`."""

    def __init__(self, trainer: Trainer, wholes: dict[str, torch.Tensor]) -> None:
        self._trainer, self._rank_states = trainer, wholes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    def owned_shards(self) -> Iterator[OwnedShard]:
        fragments = list(self._trainer.owned_shards())
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
    if plan.strategy.zero_stage > 0 or plan.strategy.zero_world_size == 1:
        return None
    members: dict[tuple[int, int], list[int]] = {}
    for r in plan.ranks:
        members.setdefault((r.pipeline, r.tensor), []).append(r.rank)
    groups = [(ranks, dist.new_group(ranks, backend="gloo")) for ranks in members.values()]
    return next(group for ranks, group in groups if rank in ranks)


ANCHOR, MOMENTUM, SENT, ARRIVED = OUTER_ANCHOR, "outer_momentum", "outer_sent", "outer_arrived"
"""SENT: deltas of a round that is not made yet. ARRIVED: the anchor of one that is, and is to be
mixed in, in a checkpoint of the very step that it was begun after."""
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterStepResult:
    """Holds the result of the outer step after `step`.

    done: the step that the weights are at now. members: () where another island's state was taken.
    seconds: the time that training waited. sent_bytes: by this rank, without copies.
    """

    step: int
    done: int
    members: tuple[int, ...]
    seconds: float
    sent_bytes: int


class OuterStep(Protocol):
    """Defines the calls of a session between optimizer steps. Every rank makes the same calls."""

    delay_steps: int
    """Optimizer steps after which an outer step's result is in the weights."""

    def begin(self, done: int, checkpoint: Path | None) -> list[OuterStepResult]:
        """Return the outer steps that were caught up on before the first optimizer step."""
        ...

    def after(self, step: int) -> Iterable[OuterStepResult]:
        """Run the outer steps that end with optimizer step `step`.

        Raises OuterStoreUnreachable on every rank; the session then saves a checkpoint.
        """
        ...

    def before_save(self, step: int) -> OuterStepResult | None:
        """Apply a round that has arrived already, so that the checkpoint has its result."""
        ...

    def trainer_with_states(self, step: int) -> Trainer:
        """Return the trainer with the states that a checkpoint holds beside its own."""
        ...

    def leave(self, *, done: bool) -> None:
        """Say that this island trains no more. done: it has trained to the last step."""
        ...


def build_outer_step(
    plan: Plan, folder: Path, trainer: Trainer, rank: int, attempt: int, data_digest: str
) -> OuterStep:
    """Return DiLoCo's outer step for a plan of several islands, else one that does nothing."""
    if plan.outer is None:
        return NoOuterStep(trainer)
    return DiLoCoOuterStep(plan, folder, trainer, rank, attempt, data_digest)


class NoOuterStep:
    """The outer step of a run that is one world: nothing is exchanged."""

    delay_steps = 0

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def begin(self, done: int, checkpoint: Path | None) -> list[OuterStepResult]:
        return []

    def after(self, step: int) -> Iterable[OuterStepResult]:
        return ()

    def before_save(self, step: int) -> None:
        return None

    def trainer_with_states(self, step: int) -> Trainer:
        return self._trainer

    def leave(self, *, done: bool) -> None:
        return None


class DiLoCoOuterStep:
    """DiLoCo between islands. base: the step of the last outer step that the anchor has.

    Rank 0 writes a line of run/outer.jsonl for each outer step.
    """

    def __init__(
        self, plan: Plan, folder: Path, trainer: Trainer, rank: int, attempt: int, data_digest: str
    ) -> None:
        """Collective. attempt: the folder's count of starts. Raises Refusal: SW6313 where this host
        has no secret."""
        self.plan, self.outer, self.delay_steps = plan, plan.diloco, plan.diloco.overlap_steps
        self._trainer, self._folder, self._rank, self._attempt = trainer, folder, rank, attempt
        self._writer: JsonLinesWriter | None = None  # rank 0's
        self._connections = OuterStoreConnections(plan, folder, rank, attempt, data_digest)
        self._master_shard = MasterShard(plan, trainer, rank)
        self.base = 0
        self._overlapped_round: _OverlappedRound | None = None
        self._receivers: list[
            int
        ] = []  # islands that take this one's state, once the weights are there
        self._mixing_step: int | None = (
            None  # the step after which the last round's result is mixed in
        )
        # Of one round, taken in before the next one begins. What is written for the first time
        # takes as long as sending a part of it.
        self._own, self._sent, self._means = (torch.zeros(0) for _ in range(3))
        self._anchor = self._master_shard.own(MASTER)
        self._momentum = (
            torch.zeros_like(self._anchor) if plan.diloco.optimizer == "nesterov" else None
        )

    def begin(self, done: int, checkpoint: Path | None) -> list[OuterStepResult]:
        """Collective. Meets the other islands before the first step. done: the step that
        `checkpoint` closed. Returns the outer steps that were made up for: after the last one this
        island goes on from its `done`, which is another island's where this one is behind.

        Raises Refusal: SW6314 where the store is not reached, and for what the store refuses.
        """
        self.base, self._anchor = done, self._master_shard.own(MASTER)
        owed = None if checkpoint is None else self._load(done, checkpoint)
        try:
            outcome = self._exchange(*(owed or (done, None)))
            made = (
                [self._apply_exchange(outcome, done)] if outcome.answer.kind != FrameKind.GO else []
            )
            done = made[-1].done if made else done
            if self._mixing_step is not None and done >= self._mixing_step:
                self._mix(done)
            if done == self._last and self.base != done:  # the round before the last was on its way
                made.append(self._run_outer_step(done))
        except OuterStoreUnreachable as error:
            raise refusal(
                "SW6314",
                f"the outer store was not reached for {self.outer.deadline_seconds:g} s: {error}",
                (
                    "Start `shardwright outer-store DIR` at launch.outer_store, and check that "
                    "this host reaches it. Nothing was trained."
                ),
            ) from None
        if self._rank == 0:
            known = min([self.base, *(each.step - 1 for each in made)])
            path = self._folder / OUTER_STEPS_FILE
            self._writer = JsonLinesWriter(path, self._attempt, known)
        for result in made:
            self._record(result)
        return made

    def _record(self, result: OuterStepResult) -> OuterStepResult:
        """Add a line to run/outer.jsonl; its members are [] where another island's state came."""
        if self._writer is not None:
            members, seconds = list(result.members), result.seconds
            self._writer.write_line(
                step=result.step, members=members, seconds=seconds, bytes=result.sent_bytes
            )
            islands = ", ".join(map(str, members))
            what = f"islands {islands}" if members else "took another island's state"
            print(f"outer step at {result.step}  {what}  {seconds:.3g} s", flush=True)
        return result

    def after(self, step: int) -> Iterator[OuterStepResult]:
        """Collective. The outer steps that end with this inner one. Raises OuterStoreUnreachable on
        every rank, and Refusal."""
        if step == self._mixing_step:
            landed = self._finish_overlapped_round(step)
            if landed is not None:
                yield self._record(landed)
                step = landed.done
        if self.outer.is_due(step, self._last) and self.base != step:
            if self._overlaps(step):
                began = time.monotonic()
                deltas, names = self._deltas(), self._state_names()
                future = self._connections.start_in_thread(
                    lambda link: self._exchange_on_this_rank(link, step, deltas, names)
                )
                self._mixing_step = self._overlap_end_step(step)
                self._overlapped_round = _OverlappedRound(
                    step=step, deltas=deltas, future=future, seconds=time.monotonic() - began
                )
            else:
                yield self._record(self._run_outer_step(step))

    @property
    def _last(self) -> int:
        return self.plan.training.steps

    def _overlaps(self, step: int) -> bool:
        """Return whether training continues while this step's round is under way. After the last
        step there is nothing left to train."""
        return self.outer.overlap_steps > 0 and step != self._last

    def _overlap_end_step(self, step: int) -> int:
        """The step after which the weights have the outer step of `step`."""
        return min(step + self.outer.overlap_steps, self._last)

    def _run_outer_step(self, step: int) -> OuterStepResult:
        """Collective. An outer step that training waits for."""
        began = time.monotonic()
        result = self._apply_exchange(self._exchange(step, self._deltas()), step)
        return replace(result, seconds=time.monotonic() - began)

    def _finish_overlapped_round(self, step: int) -> OuterStepResult | None:
        """Collective. Waits for the round that is on its way, and mixes its result in. None where
        `before_save` returned it already."""
        began, flight, result = time.monotonic(), self._overlapped_round, None
        if flight is not None:
            outcome = self._connections.wait_for_thread(flight.future) or self._exchange(
                flight.step, flight.deltas
            )
            result = self._apply_exchange(outcome, step)
        if self._mixing_step is not None:
            self._mix(step)
        if flight is None or result is None:
            return None
        return replace(result, seconds=flight.seconds + time.monotonic() - began)

    def before_save(self, step: int) -> OuterStepResult | None:
        """Collective. Applies the overlapped round to the anchor where every rank has its result.
        It is mixed into the weights when it is due."""
        flight = self._overlapped_round
        if flight is None:
            return None
        future = flight.future
        is_made = (
            future.done()
            and future.exception() is None
            and future.result().answer.kind == FrameKind.EXCHANGE
        )
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, is_made)
        if not all(everyone):
            return None
        result = self._apply_exchange(future.result(), step)
        return self._record(replace(result, seconds=flight.seconds))

    def _apply_exchange(self, outcome: _ExchangeResult, step: int) -> OuterStepResult:
        """Collective. step: that the weights are at."""
        answer, self._overlapped_round = outcome.answer, None
        if answer.kind == FrameKind.RECEIVE:
            self._anchor, self._momentum = (
                outcome.taken.pop(ANCHOR, outcome.taken[MASTER]),
                outcome.taken.pop(MOMENTUM, None),
            )
            for state, own in outcome.taken.items():
                self._master_shard.write(state, own)
            self._trainer.finish_restore(
                self._overlap_end_step(answer.step),
                OptimizerCounters(updates=outcome.updates, loss_scale=None),
            )
            self.base, self._mixing_step = answer.step, None
            step = self._overlap_end_step(answer.step)
        else:
            # SGD with Nesterov momentum as torch.optim.SGD has it, or the average.
            if self._momentum is None or self.outer.lr is None or self.outer.momentum is None:
                self._anchor -= outcome.means
            else:
                self._momentum.mul_(self.outer.momentum).add_(outcome.means)
                self._anchor.sub_(outcome.means, alpha=self.outer.lr)
                self._anchor.sub_(self._momentum, alpha=self.outer.lr * self.outer.momentum)
            self.base, self._receivers = answer.step, outcome.receivers
            self._mixing_step = (
                self._overlap_end_step(answer.step) if self._overlaps(answer.step) else None
            )
            if self._mixing_step is None:
                self._set(self._anchor, step)
        sent = _bytes(outcome.means).nbytes
        return OuterStepResult(
            step=self.base, done=step, members=answer.members, seconds=0.0, sent_bytes=sent
        )

    def leave(self, *, done: bool) -> None:
        """After every rank's last word. done: trained to the last step."""
        self._connections.leave(done=done)

    # What a checkpoint holds beside the trainer's own.

    def trainer_with_states(self, step: int) -> Trainer:
        """Collective. The trainer with the outer momentum, and with the anchor where the weights
        are not it."""
        states = {} if self._momentum is None else {MOMENTUM: self._momentum}
        if self._overlapped_round is not None and step != self._overlapped_round.step:
            states[SENT] = self._overlapped_round.deltas.float()
        if self.base != step:
            states[ANCHOR] = self._anchor
        elif self._mixing_step is not None:
            states[ARRIVED] = self._anchor
        return self._master_shard.trainer_with_states(states)

    def _load(self, done: int, checkpoint: Path) -> tuple[int, torch.Tensor] | None:
        """Collective. Returns the outer step that is still to be made, and its deltas. Raises
        Refusal: SW6218 where one was on its way under other keys of training.outer."""
        states = self._master_shard.load((ANCHOR, ARRIVED, SENT, MOMENTUM), checkpoint)
        if self._momentum is not None:
            self._momentum = states.get(MOMENTUM, self._momentum)
        if not states.keys() & {ANCHOR, ARRIVED}:
            return None
        newest = (
            done
            if ARRIVED in states
            else (done - 1) // self.outer.every_steps * self.outer.every_steps
        )
        self._anchor, self.base = states.get(ANCHOR, states.get(ARRIVED, self._anchor)), newest
        self._check_same_overlap(
            done, checkpoint, on_its_way=not states.keys().isdisjoint({ARRIVED, SENT})
        )
        if SENT in states:
            self.base = newest - self.outer.every_steps
            return newest, states[SENT].to(_DTYPES[self.outer.precision])
        if newest and self._overlaps(newest) and done < self._overlap_end_step(newest):
            self._mixing_step = self._overlap_end_step(newest)
        is_due = ARRIVED not in states and self.outer.is_due(done, self._last)
        return (done, self._deltas()) if is_due else None

    def _check_same_overlap(self, done: int, checkpoint: Path, *, on_its_way: bool) -> None:
        written = read_plan(checkpoint).outer
        if written is None:
            return
        keys = ("every_steps", "overlap_steps")
        then, now = ({key: getattr(outer, key) for key in keys} for outer in (written, self.outer))
        is_overlapped = (
            done >= written.every_steps and done % written.every_steps < written.overlap_steps
        )
        if (on_its_way or is_overlapped) and then != now:
            was = ", ".join(f"{key} {value}" for key, value in then.items())
            raise refusal(
                "SW6218",
                f"{str(checkpoint)!r} was written during an outer step, with {was}",
                (
                    "Compile with these values, and train to the next checkpoint. Change "
                    "training.outer after that checkpoint."
                ),
            )

    def _deltas(self) -> torch.Tensor:
        """Return this rank's deltas, in the precision they are sent in. Raises Refusal on every
        rank where one is not finite: SW6317."""
        own = self._master_shard.own(MASTER, self._own)
        deltas = torch.sub(self._anchor, own, out=own)
        if self.outer.precision == "bf16":
            self._sent = _buffer_like(self._sent, deltas.numel(), torch.bfloat16)
            deltas = self._sent.copy_(deltas)
        flags: list[Any] = [None] * dist.get_world_size()
        # One pass, which makes no other tensor.
        dist.all_gather_object(
            flags, deltas.numel() == 0 or all(bool(end.isfinite()) for end in deltas.aminmax())
        )
        if not all(flags):
            raise refusal(
                "SW6317",
                (
                    f"island {self.outer.island} has weights that are not finite (rank "
                    f"{flags.index(False)}): the other islands do not get them"
                ),
                (
                    "The other islands continue. `shardwright run` resumes this island from its "
                    "newest checkpoint with a finite loss, and takes their state at the next outer "
                    "step."
                ),
            )
        return deltas

    def _mix(self, step: int) -> None:
        """Collective. What the islands made of the weights before the overlap, into what this one
        has made since."""
        assert self.outer.mixing is not None, "a plan with overlap has it"
        self._mixing_step = None
        own = self._master_shard.own(MASTER, self._own)
        self._set(torch.lerp(own, self._anchor, self.outer.mixing, out=own), step)

    def _set(self, own: torch.Tensor, step: int) -> None:
        """Collective. The weights; and who waits for this island's state gets it."""
        self._master_shard.write(MASTER, own)
        self._trainer.finish_restore(step, self._trainer.counters())
        if self._receivers:
            # Islands that are behind take this state. A connection that breaks here is noticed at
            # the next outer step.
            kept = {ANCHOR: self._anchor} | (
                {} if self._momentum is None else {MOMENTUM: self._momentum}
            )
            parts = (
                kept[name] if name in kept else self._master_shard.own(name)
                for name in self._state_names()
            )
            with contextlib.suppress(ChannelError):
                self._connections.link.send_state(
                    (_bytes(part) for part in parts), self._trainer.counters().updates
                )
        self._receivers = []

    # Another island's state.

    def _state_names(self) -> list[str]:
        """The same on every rank and island: the master first."""
        more = {ANCHOR: self.outer.overlap_steps > 0, MOMENTUM: self._momentum is not None}
        return [*self._master_shard.state_names(), *(name for name, has in more.items() if has)]

    # The store.

    def _exchange(self, step: int, deltas: torch.Tensor | None) -> _ExchangeResult:
        """Collective. What comes of the outer step after `step`, however often it has to be begun;
        without deltas only says that the island is there. Raises OuterStoreUnreachable on every
        rank, and Refusal."""
        names = self._state_names()
        return self._connections.run_on_all_ranks(
            step, lambda link: self._exchange_on_this_rank(link, step, deltas, names)
        )

    def _exchange_on_this_rank(
        self, link: Link, step: int, deltas: torch.Tensor | None, names: list[str]
    ) -> _ExchangeResult:
        """This rank's part; maybe in a thread of its own, so that it leaves the trainer alone.
        Raises ChannelError."""
        sent = torch.zeros(0) if deltas is None else deltas
        self._means = _buffer_like(self._means, sent.numel(), sent.dtype)
        found = _ExchangeResult(means=self._means)
        check, size = (
            int(self._anchor.view(torch.int32).sum(dtype=torch.int64)),
            _bytes(sent).nbytes,
        )
        while True:
            found.answer = link.arrive(
                base=self.base, step=step, is_due=deltas is not None, size=size, check=check
            )
            if found.answer.kind == FrameKind.GO:
                return found
            if found.answer.kind == FrameKind.RECEIVE:
                found.taken = {name: torch.empty_like(self._anchor) for name in names}
                found.updates = link.receive_state(_bytes(part) for part in found.taken.values())
                return found
            receivers = link.exchange(found.answer.attempt, _bytes(sent), _bytes(found.means))
            if receivers is not None:
                found.receivers = receivers
                return found


def _buffer_like(buffer: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """The buffer, or another one where it is not."""
    return (
        buffer
        if (buffer.numel(), buffer.dtype) == (numel, dtype)
        else torch.empty(numel, dtype=dtype)
    )


@dataclass(slots=True, kw_only=True)
class _ExchangeResult:
    """Holds what a rank received in an outer step. taken: the state of another island, where it
    takes one."""

    means: torch.Tensor
    answer: RoundReply = field(default_factory=lambda: RoundReply(kind=FrameKind.GO))
    receivers: list[int] = field(default_factory=list)
    taken: dict[str, torch.Tensor] = field(default_factory=dict)
    updates: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _OverlappedRound:
    """A round that is on its way while training goes on. seconds: that training has waited for
    it."""

    step: int
    deltas: torch.Tensor
    future: Future[_ExchangeResult]
    seconds: float


def _bytes(values: torch.Tensor) -> memoryview:
    """The tensor's own memory."""
    flat = values.view(torch.int16) if values.dtype == torch.bfloat16 else values
    return flat.numpy().data.cast("B") if flat.numel() else memoryview(b"")

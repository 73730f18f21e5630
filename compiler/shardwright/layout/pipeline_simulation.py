"""One step as discrete events: each pipeline rank runs its instruction stream; messages wait for
both their ends.

DeepSpeed sends and receives in order and blocks (runtime/pipe/p2p.py: dist.send, dist.recv): a
message starts when both ranks have come to it and holds both until it has arrived, with gloo as
with NCCL on one stream. DualPipeV launches what it has queued and waits for all of it
(batch_isend_irecv). Messages of one direction follow each other on their link.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardwright.layout.pipeline_instructions import (
    BACKWARD,
    COMMIT,
    FORWARD,
    RECV_GRADIENT,
    SEND_ACTIVATION,
    SEND_GRADIENT,
    Instruction,
    instruction_stream,
)

Link = tuple[int, int]
"""Sending and receiving pipeline rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeInterval:
    """One pass of one micro-batch over one stage's layers. name: ForwardPass | BackwardPass."""

    name: str
    stage: int
    micro_batch: int
    start_seconds: float
    stop_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageWait:
    """Messages that a rank waits for together: it comes at ready, they move from start to stop."""

    ready_seconds: float
    start_seconds: float
    stop_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTimeline:
    """ranks: what each pipeline rank computes, in order; exchanges: its messages. It waits in the
    gaps."""

    seconds: float
    ranks: tuple[tuple[ComputeInterval, ...], ...]
    exchanges: tuple[tuple[MessageWait, ...], ...]


@dataclass(slots=True)
class _Message:
    """ready: when each end came to it (sender, receiver); started, arrived: None until both
    have."""

    ready: list[float | None]
    started: float | None = None
    arrived: float | None = None


def simulate(
    schedule: str,
    micro_batches: int,
    forward_seconds: Sequence[float],
    backward_seconds: Sequence[float],
    send_seconds: Sequence[float],
) -> PipelineTimeline:
    """forward, backward: per stage, one micro-batch, recomputation included; send: per boundary
    between pipeline ranks, one message. Stages are p for 1f1b and 2 p for dualpipev, whose rank r
    holds r and 2 p - 1 - r."""
    stages = len(forward_seconds)
    count = stages // 2 if schedule == "dualpipev" else stages
    links = _Links(send_seconds)
    ranks = [
        _Rank(
            number=rank,
            program=message_groups(
                instruction_stream(schedule, count, rank, micro_batches), schedule
            ),
            seconds={FORWARD: forward_seconds, BACKWARD: backward_seconds},
            stages=(rank, stages - 1 - rank),
        )
        for rank in range(count)
    ]
    moved = True
    while moved:
        moved = False
        for rank in ranks:
            while rank.advance(links):
                moved = True
    if any(rank.waiting is not None for rank in ranks):
        raise ValueError(
            f"{schedule} over {count} ranks and {micro_batches} micro-batches waits for itself"
        )
    return PipelineTimeline(
        seconds=max(rank.now for rank in ranks),
        ranks=tuple(tuple(rank.done) for rank in ranks),
        exchanges=tuple(tuple(rank.exchanged) for rank in ranks),
    )


class _Links:
    """Every message of the step, by its link. Those of one link follow each other."""

    def __init__(self, send_seconds: Sequence[float]) -> None:
        self._send_seconds = send_seconds
        self._messages: dict[Link, list[_Message]] = defaultdict(list)
        self._posted: dict[tuple[Link, int], int] = defaultdict(int)

    def post(self, rank: int, now: float, instruction: Instruction) -> _Message:
        """The message, which the rank has come to now; it starts where the other end has, too."""
        link, end = link_and_end(instruction, rank)
        number, messages = self._posted[link, end], self._messages[link]
        self._posted[link, end] += 1
        if number == len(messages):
            messages.append(_Message([None, None]))
        message = messages[number]
        message.ready[end] = now
        sent, taken = message.ready
        if sent is not None and taken is not None:
            before = messages[number - 1].arrived if number else None
            message.started = max(sent, taken, before or 0.0)
            message.arrived = message.started + self._send_seconds[min(link)]
        return message


@dataclass(slots=True, kw_only=True)
class _Rank:
    """One pipeline rank: where its program stands, and what it has done. stages: by an
    instruction's phase. seconds: by its name, of all stages. waiting: messages that the next
    instruction waits for."""

    number: int
    program: list[Instruction | tuple[Instruction, ...]]
    stages: tuple[int, int]
    seconds: Mapping[str, Sequence[float]]
    now: float = 0.0
    at: int = 0
    waiting: list[_Message] | None = None
    done: list[ComputeInterval] = field(default_factory=list)
    exchanged: list[MessageWait] = field(default_factory=list)

    def advance(self, links: _Links) -> bool:
        """One instruction (or one group of messages) further; False where the rank has to wait, or
        is done."""
        if self.waiting is not None:
            return self._receive(self.waiting)
        if self.at == len(self.program):
            return False
        step = self.program[self.at]
        self.at += 1
        if isinstance(step, Instruction):
            self._compute(step)
        else:
            self.waiting = [links.post(self.number, self.now, message) for message in step]
        return True

    def _receive(self, pending: list[_Message]) -> bool:
        """Whether all of them have arrived."""
        arrived = [m.arrived for m in pending if m.arrived is not None]
        if len(arrived) < len(pending):
            return False
        stop = max([self.now, *arrived])
        if pending:
            started = min(m.started for m in pending if m.started is not None)
            self.exchanged.append(
                MessageWait(
                    ready_seconds=self.now, start_seconds=max(self.now, started), stop_seconds=stop
                )
            )
        self.now, self.waiting = stop, None
        return True

    def _compute(self, step: Instruction) -> None:
        start, stage = self.now, self.stages[step.phase]
        self.now += self.seconds[step.name][stage]
        self.done.append(
            ComputeInterval(
                name=step.name,
                stage=stage,
                micro_batch=step.micro_batch,
                start_seconds=start,
                stop_seconds=self.now,
            )
        )


def message_groups(
    instructions: tuple[Instruction, ...], schedule: str
) -> list[Instruction | tuple[Instruction, ...]]:
    """Passes as they are; messages in the groups that are waited for together: one by one, or up to
    a commit."""
    out: list[Instruction | tuple[Instruction, ...]] = []
    queued: list[Instruction] = []
    for instruction in instructions:
        if instruction.name in (FORWARD, BACKWARD):
            out.append(instruction)
        elif instruction.name == COMMIT:
            out.append(tuple(queued))
            queued = []
        elif schedule == "dualpipev":
            queued.append(instruction)
        else:
            out.append((instruction,))
    return out


def link_and_end(instruction: Instruction, rank: int) -> tuple[Link, int]:
    """The link of a message, and which end of it this rank is: 0 sends, 1 receives."""
    # Activations go to the next rank in phase 0 and back in phase 1, gradients the other way.
    towards_next = instruction.name in (SEND_ACTIVATION, RECV_GRADIENT)
    peer = rank + 1 if towards_next == (instruction.phase == 0) else rank - 1
    if instruction.name in (SEND_ACTIVATION, SEND_GRADIENT):
        return (rank, peer), 0
    return (peer, rank), 1
